"""A one-step flow model trains with forward-mode derivatives.    python examples/mean_flow.py

The data are the corners of an octagon at a random angle; only attention relates the corners. u(z, r, t) is the mean
velocity from time r to t between data (time 0) and noise (time 1). It learns v - (t - r) du/dt, and du/dt is one
`torch.func.jvp` through attention. Source: Mean Flows, arXiv:2505.13447, algorithms 1 and 2.
"""

import math

import torch
from torch import nn

import fusedattn as fa

CORNERS, WIDTH, HEADS, BATCH, STEPS = 8, 48, 3, 64, 300


class MeanVelocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.corner = nn.Linear(4, WIDTH), nn.Parameter(torch.randn(CORNERS, WIDTH))
        self.attention = fa.MultiHeadAttention(WIDTH, HEADS)
        self.write = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 2))

    def forward(self, z, r, t):  # (B, CORNERS, 2), and times (B, 1, 1)
        x = self.read(torch.cat([z, torch.cat([t, t - r], -1).expand(-1, CORNERS, -1)], -1)) + self.corner
        return self.write(x + self.attention(x)[0])


def distance(drawings):  # mean distance of the corners from the best-fitting octagon
    corners, octagon = torch.view_as_complex(drawings.contiguous()), torch.polar(torch.ones_like(angles), angles)
    return (corners - (corners * octagon.conj()).mean(1, keepdim=True).sgn() * octagon).abs().mean().item()


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
angles, model = torch.arange(CORNERS, device=device) * math.tau / CORNERS, MeanVelocity().to(device)
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=4e-3), []
for _ in range(STEPS):
    turned, noise = angles + math.tau * torch.rand(BATCH, 1, device=device), torch.randn(BATCH, CORNERS, 2).to(device)
    data, (r, t) = torch.stack([turned.cos(), turned.sin()], -1), torch.rand(2, BATCH, 1, 1, device=device).sort(0)[0]
    r[::2] = t[::2]  # half of a batch learns v itself
    v, z = noise - data, (1 - t) * data + t * noise
    way = v, torch.zeros_like(r), torch.ones_like(t)
    u, du_dt = torch.func.jvp(model, (z, r, t), way)
    loss = (u - (v - (t - r) * du_dt).detach()).square().mean((1, 2))
    optimizer.zero_grad()
    (loss / (loss.detach() + 0.01)).mean().backward()  # gives large losses a smaller weight
    optimizer.step()
    losses.append(loss.mean().item())

print(f"the loss was {losses[0]:.2f}, and is {(last := sum(losses[-100:]) / 100):.2f}")
noise = torch.randn(1000, CORNERS, 2, device=device)
drawn = noise - model(noise, torch.zeros(1000, 1, 1, device=device), torch.ones(1000, 1, 1, device=device))
print(f"corners are {distance(noise):.2f} from an octagon's in noise, and drawn in one step {distance(drawn):.2f}")
assert last < 0.75 * losses[0] and distance(drawn) < 0.5 * distance(noise), "the model did not learn"
du_dt, exact = torch.func.jvp(model, (z, r, t), way)[1], model.double()
before, after = (exact(*(x.double() + h * d for x, d in zip((z, r, t), way, strict=True))) for h in (-1e-4, 1e-4))
print(f"du/dt is at most {(wrong := (du_dt - (after - before) / 2e-4).abs().max()):.0e} from finite differences")
assert wrong < 1e-3, "the derivative is wrong"
