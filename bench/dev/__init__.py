"""Questions that only developers ask: run from the repository, not installed."""
