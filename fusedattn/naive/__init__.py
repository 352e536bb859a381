"""The backend "naive": attention by its definition, in PyTorch operations, on any device."""
