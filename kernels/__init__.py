"""The Triton kernels: one a file, made of the words in `vocabulary`."""
