"""Kernel launches: tiles, arguments, and failed kernels to avoid. Triton is imported here."""
