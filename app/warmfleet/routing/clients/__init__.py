"""A request's tenant, and how a request counts for its client where a model has several pools."""
