"""The definition in PyTorch, which is also the path of a CPU."""
