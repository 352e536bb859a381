"""The Triton kernels, one per file, built from the shared functions in `vocabulary`."""
