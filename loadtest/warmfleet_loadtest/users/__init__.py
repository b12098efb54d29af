"""The users of a load test with Locust: their arrivals, their requests, and the counts and reports of a run."""
