"""Attention on a CPU by PyTorch's own fused kernel, called for what is seen and for nothing else: the backend "cpu"."""
