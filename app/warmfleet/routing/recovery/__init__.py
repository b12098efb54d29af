"""A request gets another worker when its own fails it or is late, within a budget."""
