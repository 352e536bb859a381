"""A byte-level causal language model made of fusedattn.layers, and text generation with it."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...api import attention_decode
from ...layers import TransformerEncoderLayer
from .text import CONTEXT

WIDTH, HEADS, DIM, LAYERS, DROPOUT = 128, 4, 32, 2, 0.1


class LanguageModel(nn.Module):
    """tokens (B, S) -> logits (B, S, 256) of the byte after each."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layers = (TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, causal=True) for _ in range(LAYERS))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def embed(self, tokens: Tensor, first: int | Tensor = 0) -> Tensor:
        """(B, S, E) of tokens (B, S) that stand at the positions from `first` on, or at those that it names."""
        if isinstance(first, Tensor):
            return self.tokens(tokens) + self.positions(first)
        end = first + tokens.shape[1]
        if end > CONTEXT:
            raise ValueError(f"tokens: expected at most {CONTEXT}, those before `first` included, got {end}")
        return self.tokens(tokens) + self.positions.weight[first:end]

    def forward(
        self, tokens: Tensor, attends: Sequence[Callable | None] = (None,) * LAYERS, first: int | Tensor = 0
    ) -> Tensor:
        """attends: of each layer a function of query, key and value (B, H, S, D), or None for its own attention."""
        x = self.embed(tokens, first)
        for block, attend in zip(self.blocks, attends, strict=True):
            normed = block.layer_norm_1(x)
            if attend is None:
                attended, _ = block.attention(normed)
            else:
                out = attend(*heads(block.attention, normed))
                attended = block.attention.out_proj(out.transpose(1, 2).flatten(2))
            x = x + attended
            x = x + block.feed_forward(block.layer_norm_2(x))
        return self.head(x)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of the bytes of windows (B, S + 1) after the first."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def maps(self, tokens: Tensor) -> Tensor:
        """(H, S, S): attention weights of the last layer for tokens (1, S)."""
        *earlier, last = self.blocks
        x = nn.Sequential(*earlier)(self.embed(tokens))
        return last.attention(last.layer_norm_1(x), need_weights=True)[1][0]


def heads(layer, x: Tensor) -> list[Tensor]:
    """query, key and value (B, H, S, D) of an attention layer with the input x (B, S, E)."""
    projections = layer.q_proj, layer.k_proj, layer.v_proj
    return [project(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for project in projections]


def read_on(model: LanguageModel, caches: Tensor, tokens: Tensor, read: int) -> Tensor:
    """Logits of tokens (B, S) after `read` others, with the keys and values in (LAYERS, 2, B, H, CONTEXT, D) caches."""
    options = dict(causal=True, cache_seqlens=torch.full((len(tokens),), read, dtype=torch.int32, device=tokens.device))

    def attend(cache):
        return lambda query, key, value: attention_decode(query, *cache, new_key=key, new_value=value, **options)

    return model(tokens, [attend(cache) for cache in caches], read)


@torch.no_grad()
def write(model: LanguageModel, prompt: Tensor, count: int, cached=False, temperature=0.0) -> tuple[Tensor, Tensor]:
    """(tokens (B, S + count), logits (B, count, 256)): a prompt (B, S) and new bytes, the likeliest or at random.

    A cache ends with the context: positions count from the start of the window; one that moves on changes every key.
    """
    caches = model.positions.weight.new_empty(LAYERS, 2, len(prompt), HEADS, CONTEXT, DIM)
    tokens, logits, read = prompt, [], 0
    for _ in range(count):
        seen = read_on(model, caches, tokens[:, read:], read) if cached else model(tokens[:, -CONTEXT:])
        logits.append(seen[:, -1])
        read = tokens.shape[1]
        likeliest = logits[-1].argmax(-1, keepdim=True)
        new = (logits[-1] / temperature).softmax(-1).multinomial(1) if temperature else likeliest
        tokens = torch.cat([tokens, new], 1)
    return tokens, torch.stack(logits, 1)
