"""The status page of a replica: its files, and the data that it shows."""
