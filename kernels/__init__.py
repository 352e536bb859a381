"""The Triton kernels for any GPU, one kernel a file, built from the shared functions of `vocabulary`."""
