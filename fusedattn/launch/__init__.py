"""Launches kernels: tries tiles, makes arguments, keeps failures. Triton is imported here."""
