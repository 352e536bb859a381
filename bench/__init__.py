"""Benchmarks: six questions, one CSV format, and tables and plots of the rows."""
