"""Kernel launches: tries tiles, makes arguments, remembers failed kernels. Triton is imported here."""
