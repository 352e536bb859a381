"""Tolerance, comparison and cases that tests, `fusedattn check` and the benchmarks share."""
