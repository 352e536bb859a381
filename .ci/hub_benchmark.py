"""Benchmarks for Hugging Face's command `kernels benchmark`: its own attention workloads."""

import torch
from kernels.benchmarks import FlashAttentionBenchmark, FlashAttentionCausalBenchmark, FlashAttentionVarlenBenchmark

if torch.cuda.is_available():  # the workloads of `kernels` always put their tensors on a GPU

    class FlashAttention(FlashAttentionBenchmark): ...

    class FlashAttentionCausal(FlashAttentionCausalBenchmark): ...

    class FlashAttentionVarlen(FlashAttentionVarlenBenchmark): ...
