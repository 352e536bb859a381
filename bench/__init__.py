"""Benchmarks: rows of one CSV format, and tables, sentences and pictures of the rows alone. dev/ is not installed."""
