"""Tolerance, comparison and named cases, which tests, `fusedattn check` and the benchmarks share."""
