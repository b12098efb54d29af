"""Retries, hedging and continuation: another worker for a request whose worker fails or is late, within a budget."""
