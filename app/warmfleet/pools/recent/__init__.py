"""What this replica did lately, for people who look."""
