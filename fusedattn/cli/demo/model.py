"""A byte-level causal language model, of plain torch.nn around fusedattn.MultiHeadAttention."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...modules import MultiHeadAttention
from .text import CONTEXT

WIDTH, HEADS, LAYERS, DROPOUT = 128, 4, 2, 0.1


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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x))[0])
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

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
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


@torch.no_grad()
def continuation(
    model: LanguageModel, prompt: bytes, length: int, dice: torch.Generator, temperature: float = 0.6
) -> str:
    """The prompt and what the model has to add to it, byte by byte."""
    device = model.positions.weight.device
    written = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([written[-CONTEXT:]], device=device))[0, -1].float().cpu()
        written.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=dice)))
    return bytes(written).decode("utf-8", errors="replace")
