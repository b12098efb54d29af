"""The state that this replica keeps of each model: its workers, its policy, its waiting times."""
