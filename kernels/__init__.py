"""Triton kernels for any GPU, one a file; Gluon kernels for Hopper in `hopper`; shared functions in `vocabulary`."""
