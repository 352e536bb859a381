"""Benchmarks by question (see `cases`): their rows in one CSV format, and tables and plots of the rows."""
