"""Fused multi-head attention in Triton for NVIDIA GPUs, with a naive PyTorch path that runs anywhere."""

import sys

from . import compat, distributed, layers, masks, plot, reference
from .api import attention, attention_decode, attention_varlen, merge, plan
from .call.options import Plan
from .dispatch import tuning
from .dispatch.backends import Explanation, explain, use_backend
from .layers.attention import MultiHeadAttention, SelfAttention

__all__ = ["attention", "attention_decode", "attention_varlen", "explain", "merge", "plan", "use_backend"]
__all__ += ["Explanation", "MultiHeadAttention", "Plan", "SelfAttention"]
__all__ += ["compat", "distributed", "layers", "masks", "plot", "reference", "tuning"]
__version__ = "0.1.0"
sys.modules[f"{__name__}.tuning"] = tuning  # so that `import fusedattn.tuning` works, too
