"""Packed sequences give the results of a padded batch, with fewer scores.    python examples/packed_sequences.py

A padded batch makes each sequence as long as the longest, and a mask hides the padding. A packed batch concatenates the
sequences, and offsets mark where each begins: the kernels of `fa.attention_varlen` compute no scores of padding.
"""

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

import fusedattn as fa

LENGTHS, HEADS, WIDTH = [400, 30, 150, 75], 4, 32


def packed_attention(query, key, value):  # each (T, H, D), T = sum(LENGTHS)
    offsets = pad(torch.tensor(LENGTHS, device=query.device).cumsum(0), (1, 0)).int()  # 0, 400, 430, 580, 655
    return fa.attention_varlen(query, key, value, offsets, offsets)


def padded_attention(query, key, value):
    real = torch.arange(max(LENGTHS), device=query.device) < torch.tensor(LENGTHS, device=query.device)[:, None]
    padded = [pad_sequence(x.split(LENGTHS), batch_first=True) for x in (query, key, value)]  # each (B, S, H, D)
    out = fa.attention(*(x.transpose(1, 2) for x in padded), key_mask=real)  # (B, H, S, D)
    return out.transpose(1, 2)[real]  # the rows that are no padding, (T, H, D)


def with_gradients(attention, inputs, output_gradient):
    out = attention(*inputs)
    return out, *torch.autograd.grad(out, inputs, output_gradient)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = [torch.randn(sum(LENGTHS), HEADS, WIDTH, device=device, requires_grad=True) for _ in range(3)]
output_gradient = torch.randn(sum(LENGTHS), HEADS, WIDTH, device=device)
packed = with_gradients(packed_attention, inputs, output_gradient)
padded = with_gradients(padded_attention, inputs, output_gradient)

names = ("output", "gradient of query", "gradient of key", "gradient of value")
for name, one, other in zip(names, packed, padded, strict=True):
    difference = (one - other).abs().max().item()
    print(f"{name:17} differs by at most {difference:.0e}")
    assert difference < 1e-4, f"packed and padded disagree in the {name}"
longest, count = max(LENGTHS), len(LENGTHS)
print(f"padded: {count * longest:5} rows, {count * longest**2:7} scores a head")
print(f"packed: {sum(LENGTHS):5} rows, {sum(length**2 for length in LENGTHS):7} scores a head")
