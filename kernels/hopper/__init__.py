"""Kernels for compute capability 9.0 alone, in Gluon: where Triton has none, importing them fails.

They are made of the same vocabulary as the kernels for every GPU, and mean the same.
"""
