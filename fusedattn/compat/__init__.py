"""Drop-ins for the attention of other libraries, each one changed line away; none changes anything when imported."""

from . import flash_attn, torch, transformers

__all__ = ["flash_attn", "torch", "transformers"]
