"""The work of a replica besides requests: it applies events, reads the fleet, proves workers and watches Redis."""
