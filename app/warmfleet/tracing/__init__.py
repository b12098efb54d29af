"""Traces of requests for OpenTelemetry: sampling, spans, and the export to a collector."""
