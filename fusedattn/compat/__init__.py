"""Drop-ins for the attention of other libraries: one line of a program changes, and importing them changes nothing."""

from . import flash_attn, torch, transformers

__all__ = ["flash_attn", "torch", "transformers"]
