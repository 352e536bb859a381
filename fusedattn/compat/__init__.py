"""Drop-ins for the attention of other libraries, each one changed line away; none changes anything when imported."""

from . import torch, transformers

__all__ = ["torch", "transformers"]
