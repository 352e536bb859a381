"""Benchmarks of attention: their cases, measurements, and results as CSV rows, tables and plots."""
