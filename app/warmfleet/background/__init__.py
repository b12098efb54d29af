"""The work of a replica besides requests: it applies events, reads the fleet, probes workers and watches Redis."""
