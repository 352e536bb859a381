"""Launches kernels: tiles, arguments and failures. Triton is imported here and in dispatch.recording."""
