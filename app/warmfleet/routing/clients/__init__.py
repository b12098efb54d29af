"""What a request has of its client: its tenant, and its count where a model has several pools."""
