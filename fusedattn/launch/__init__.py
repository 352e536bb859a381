"""Launches of kernels: tiles, arguments, failures. Triton is imported here and in dispatch.recording."""
