"""The client that measures, the figures of a run, and their plots."""
