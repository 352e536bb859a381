"""Drop-ins for the attention of other libraries. Each needs one changed line; importing them changes nothing."""

from . import flash_attn, torch, transformers

__all__ = ["flash_attn", "torch", "transformers"]
