"""The Triton kernels, one in each file, built from the shared functions in `vocabulary`."""
