"""The backend "cpu": attention by PyTorch's fused CPU kernel, called on rectangles of visible scores."""
