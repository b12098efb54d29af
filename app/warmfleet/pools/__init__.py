"""The state of each pool and model in this replica: workers, policy, requests, times to first token."""
