"""Benchmarks for Hugging Face's command `kernels benchmark`: its own workloads, and others for missing options."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark
from kernels.benchmarks import FlashAttentionBenchmark, FlashAttentionCausalBenchmark, FlashAttentionVarlenBenchmark

if torch.cuda.is_available():  # these workloads always put their tensors on a GPU

    class FlashAttention(FlashAttentionBenchmark): ...

    class FlashAttentionCausal(FlashAttentionCausalBenchmark): ...

    class FlashAttentionVarlen(FlashAttentionVarlenBenchmark): ...


class Attention(Benchmark):
    """Benchmark of `attention` beside SDPA (F.scaled_dot_product_attention), or the formula for other options."""

    seed = 42

    def setup(self):
        on_gpu = self.device != "cpu"
        self.length = 2048 if on_gpu else 256
        batch, heads, kv_heads, width = (4, 16, 4, 128) if on_gpu else (2, 4, 2, 64)
        like = dict(device=self.device, dtype=torch.float16 if on_gpu else torch.float32)
        self.q = torch.randn(batch, heads, self.length, width, **like)
        self.k, self.v = (torch.randn(batch, kv_heads, self.length, width, **like) for _ in range(2))
        lengths = torch.linspace(0.5, 1.0, batch, device=self.device) * self.length
        self.places = torch.arange(self.length, device=self.device)
        self.real = self.places < lengths[:, None]  # (B, Sk): up to half of a sequence is padding

    def sdpa(self, **options):
        return F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True, **options)

    def benchmark_grouped_causal(self):
        self.out = self.kernel.attention(self.q, self.k, self.v, causal=True)

    def verify_grouped_causal(self):
        return self.sdpa(is_causal=True)

    def benchmark_padding(self):
        self.out = self.kernel.attention(self.q, self.k, self.v, key_mask=self.real)

    def verify_padding(self):
        return self.sdpa(attn_mask=self.real[:, None, None])

    def benchmark_window(self):
        self.out = self.kernel.attention(self.q, self.k, self.v, causal=True, window=(self.length // 8 - 1, 0))

    def verify_window(self):
        distance = self.places[:, None] - self.places
        return self.sdpa(attn_mask=(distance >= 0) & (distance < self.length // 8))

    def gradients(self, function, **options):
        """Return the gradient of the query, with the output itself as incoming gradient."""
        query = self.q.detach().requires_grad_()
        out = function(query, self.k, self.v, **options)
        return torch.autograd.grad(out, query, out.detach())[0]

    def benchmark_training(self):
        self.out = self.gradients(self.kernel.attention, causal=True)

    def verify_training(self):
        return self.gradients(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
