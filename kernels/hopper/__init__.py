"""Gluon kernels for compute capability 9.0 alone; importing them fails where Triton has no Gluon.

They are made of the same vocabulary as the kernels for every GPU, and mean the same.
"""
