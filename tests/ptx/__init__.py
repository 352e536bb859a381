"""Executes the PTX that Triton makes of the kernels, on a CPU: whole calls of the package, on a GPU that is not there."""
