"""Drop-ins for the attention of other libraries. A program changes in one line; an import alone changes nothing."""

from . import flash_attn, torch, transformers

__all__ = ["flash_attn", "torch", "transformers"]
