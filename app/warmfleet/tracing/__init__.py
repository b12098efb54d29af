"""Traces of requests for OpenTelemetry: which are sampled, what their spans tell, and how they reach a collector."""
