"""The work of a replica besides requests: apply events, read the fleet, prove workers, watch Redis."""
