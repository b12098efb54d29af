"""What a person at a terminal sees and types: tables, progress, the words about workers, and completion."""
