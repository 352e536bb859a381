"""Benchmarks: one question a file, rows of one CSV format, tables made from the CSV alone."""
