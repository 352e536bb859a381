"""Generation with a cache gives the same logits as generation without.    python examples/generate.py

`fa.attention_decode` appends keys and values of the new tokens to the cache in place, and attends to the whole cache. A
step computes one token of each text instead of the whole text.
"""

import torch
from torch import nn

import fusedattn as fa

VOCABULARY, WIDTH, HEADS, LAYERS = 100, 64, 4, 2
BATCH, PROMPT, STEPS, CAPACITY = 3, 10, 40, 64


class Model(nn.Module):
    """Transformer: tokens (B, S) -> logits (B, S, VOCABULARY). With a cache, they follow `length` cached tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CAPACITY, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens, cache=None, length=0):
        x = self.tokens(tokens) + self.positions.weight[length : length + tokens.shape[1]]
        lengths = torch.full((len(tokens),), length, dtype=torch.int32, device=x.device)
        for layer, project in enumerate(self.projections):
            query, key, value = project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
            if cache is None:
                out = fa.attention(query, key, value, causal=True)
            else:
                new = dict(cache_seqlens=lengths, new_key=key, new_value=value)
                out = fa.attention_decode(query, *cache[layer], **new, causal=True)
            x = x + out.transpose(1, 2).flatten(2)
        return self.head(x)


torch.set_grad_enabled(False)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, differences = Model().to(device), []
text = torch.randint(VOCABULARY, (BATCH, PROMPT), device=device)
shape = LAYERS, 2, BATCH, HEADS, CAPACITY, WIDTH // HEADS  # keys and values of each layer
cache = torch.empty(shape, device=device)  # unused slots may hold anything
logits = model(text, cache)  # the whole prompt in one call
for length in range(PROMPT, PROMPT + STEPS):
    token = logits[:, -1:].argmax(-1)
    text = torch.cat([text, token], dim=1)
    logits = model(token, cache, length)
    differences.append(logits[:, -1] - model(text)[:, -1])
worst = torch.stack(differences).abs().max().item()
print("the first text goes on:", *text[0, PROMPT:].tolist())
print(f"logits of size {logits.std():.2f} differ by at most {worst:.0e} from those without a cache")
assert worst < 1e-4, "the cache changes the logits"
