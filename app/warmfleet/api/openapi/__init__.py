"""The OpenAPI document that a replica serves."""
