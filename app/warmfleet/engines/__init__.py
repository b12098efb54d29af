"""HTTP calls to engines: clients' requests (``upstream``), and the router's own calls (``engine_client``)."""
