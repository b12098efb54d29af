"""Where a served model has several pools: the choice among them, for each request."""
