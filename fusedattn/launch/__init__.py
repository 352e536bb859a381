"""Launches kernels: chooses tiles, makes arguments. Triton is imported here and in replay.recording."""
