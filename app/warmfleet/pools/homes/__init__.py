"""Where a served model has several pools: which of them a request belongs to."""
