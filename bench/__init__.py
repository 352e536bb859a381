"""Benchmarks of attention, grouped by question (see `cases`), with their results as CSV rows, tables and plots."""
