"""What tests, `fusedattn check` and the benchmarks share: the tolerance, the comparison and the cases."""
