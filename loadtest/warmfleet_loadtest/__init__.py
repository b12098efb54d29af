"""Load tests: an engine simulator with a real prefix cache, workloads, traces, reports. HTTP only."""
