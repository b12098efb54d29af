"""Traces of requests for OpenTelemetry: their sampling, their spans, and their way to a collector."""
