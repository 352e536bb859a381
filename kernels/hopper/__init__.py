"""Gluon kernels for compute capability 9.0; importing them fails if Triton has no Gluon.

They use `vocabulary`, as the Triton kernels for any GPU do, and compute the same results.
"""
