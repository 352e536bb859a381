"""The Triton kernels for any GPU, one in each file, built from the functions and words of `vocabulary`."""
