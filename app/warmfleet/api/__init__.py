"""The endpoints for clients and operators over HTTP, the limits of requests, and the answers about the fleet."""
