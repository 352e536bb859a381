"""A small causal transformer learns to copy its input.    python examples/train.py

Each row of the data is random symbols, followed by the same symbols again. The first half cannot be predicted. The
second half is easy for a model that looks back by half a row, and only attention looks back.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fusedattn as fa

SYMBOLS, HALF, WIDTH, HEADS, LAYERS, STEPS = 16, 8, 64, 4, 2, 120

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens, positions = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(2 * HALF, WIDTH)
encoder = fa.layers.TransformerEncoder(LAYERS, WIDTH, HEADS, 4 * WIDTH, causal=True)  # around fa.MultiHeadAttention
blocks = nn.Sequential(encoder, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
model = nn.ModuleList([tokens, positions, blocks]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

chance = math.log(SYMBOLS)
print(f"loss in nats, where a guess has {chance:.2f}\nstep  first half  second half")
for step in range(STEPS + 1):
    half = torch.randint(SYMBOLS, (32, HALF), device=device)
    row = torch.cat([half, half], dim=1)
    logits = blocks(tokens(row[:, :-1]) + positions.weight[:-1])  # (B, S - 1, SYMBOLS)
    losses = F.cross_entropy(logits.transpose(1, 2), row[:, 1:], reduction="none").mean(0)
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    first, second = losses[: HALF - 1].mean().item(), losses[HALF - 1 :].mean().item()
    if step % 20 == 0:
        print(f"{step:4}  {first:10.3f}  {second:11.3f}")
assert second < 0.1 * chance, "the model did not learn to look back"
assert first > 0.95 * chance, "the model saw what comes after"
