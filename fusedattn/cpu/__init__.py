"""The backend "cpu": attention by PyTorch's fused CPU kernel, called for each rectangle of visible scores."""
