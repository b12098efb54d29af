"""The users of a load test with Locust: when their requests arrive, what they ask, and what is counted."""
