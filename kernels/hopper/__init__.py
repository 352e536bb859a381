"""Gluon kernels for compute capability 9.0; importing them fails if Triton has no Gluon.

They use the vocabulary of the universal kernels, and give the same results.
"""
