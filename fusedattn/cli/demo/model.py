"""A byte-level causal language model, of plain torch.nn around fusedattn.MultiHeadAttention."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...api import attention_decode
from ...modules import MultiHeadAttention
from .text import CONTEXT

WIDTH, HEADS, LAYERS, DROPOUT = 128, 4, 2, 0.1


class Kept(NamedTuple):
    """What one attention layer keeps: keys and values (B, H, CONTEXT, D), of which lengths (B,) are there."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class Cache:
    """What a model has seen: `model(tokens, cache)` reads on from there, and returns the logits of these tokens alone.

        >>> cache = Cache(model, batch=1)
        >>> with torch.no_grad():
        ...     logits = model(prompt, cache)
        ...     logits = model(logits[:, -1:].argmax(-1), cache)

    There is room for CONTEXT tokens of each sequence of a batch. Nothing that goes through it has a gradient.
    """

    def __init__(self, model: "LanguageModel", batch: int):
        weight = model.positions.weight
        lengths = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        shape = (batch, HEADS, CONTEXT, WIDTH // HEADS)
        self.layers = [Kept(weight.new_empty(shape), weight.new_empty(shape), lengths) for _ in model.blocks]
        self.lengths, self.length = lengths, 0  # the same number, on the device and on the host

    def extend(self, count: int) -> None:
        """So many more tokens have gone through all layers."""
        self.lengths += count
        self.length += count


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = MultiHeadAttention(WIDTH, HEADS, causal=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, kept: Kept | None = None) -> Tensor:
        normed = self.norm(x)
        attended = self.attention(normed)[0] if kept is None else read_on(self.attention, normed, kept)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(x))


class LanguageModel(nn.Module):
    """tokens (B, S) -> logits (B, S, 256) of the byte after each."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """(B, S) as (B, S, E), the first of them at a position."""
        end = first + tokens.shape[1]
        if end > CONTEXT:
            raise ValueError(f"tokens: expected at most {CONTEXT}, those of the cache included, got {end}")
        return self.tokens(tokens) + self.positions.weight[first:end]

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """With a cache tokens are what comes after those that it holds, and it holds them too afterwards."""
        x = self.embed(tokens, 0 if cache is None else cache.length)
        for block, kept in zip(self.blocks, [None] * LAYERS if cache is None else cache.layers, strict=True):
            x = block(x, kept)
        if cache is not None:
            cache.extend(tokens.shape[1])
        return self.head(x)

    def loss(self, windows: Tensor, reduction: str = "mean") -> Tensor:
        """Cross entropy, in nats, of the bytes of windows (B, S + 1) after the first."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)

    def attended(self, tokens: Tensor) -> Iterator[tuple[MultiHeadAttention, Tensor]]:
        """Each attention layer with what comes into it."""
        x = self.embed(tokens)
        for block in self.blocks:
            yield block.attention, block.norm(x)
            x = block(x)

    def take(self, backend: str | None) -> "LanguageModel":
        """Itself, with all attention by one backend."""
        for block in self.blocks:
            block.attention.backend = backend
        return self


def heads(layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value (B, H, S, D) of an attention layer."""
    query, key, value = (
        project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    return query, key, value


def read_on(layer: MultiHeadAttention, x: Tensor, kept: Kept) -> Tensor:
    """The output of a layer for x (B, S, E), which comes after what is kept, and is kept from now on."""
    query, key, value = heads(layer, x)
    out = attention_decode(
        query,
        kept.keys,
        kept.values,
        cache_seqlens=kept.lengths,
        new_key=key,
        new_value=value,
        causal=layer.causal,
        backend=layer.backend,
    )
    return layer.out_proj(out.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """The same layer, computed by PyTorch's own attention, unfused: what ours is to be as good as."""

    def __init__(self, layer: MultiHeadAttention):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        with sdpa_kernel(SDPBackend.MATH):
            query, key, value = heads(self, x)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None
