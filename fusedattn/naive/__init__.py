"""Attention by its definition, in PyTorch: the naive path, which a CPU runs."""
