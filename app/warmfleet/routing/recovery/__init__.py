"""What a request gets when its worker fails it or is late: another one, within a budget."""
