"""The processes that a measurement runs against: stores, engines, router fleets, haproxy, routers of other projects."""
