"""Causal self-attention by PyTorch's calls, and by their replacements.    python examples/what_replaces_what.py

The calls differ in the order of dimensions, and in the meaning of True in a mask. Each result is compared with the
plain formula in float64.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fusedattn as fa
from fusedattn.compat.flash_attn import flash_attn_func  # in place of: from flash_attn import flash_attn_func

BATCH, LENGTH, HEADS, WIDTH = 2, 100, 4, 128

torch.set_grad_enabled(False)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).tril()
module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, device=device)
converted = fa.compat.torch.convert(copy.deepcopy(module))  # or a whole model, in place
q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, HEADS, -1)).unbind(2)
query, key, value = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, S, D) from (B, S, H, D)

attended = {  # (B, H, S, D)
    "F.scaled_dot_product_attention": F.scaled_dot_product_attention(query, key, value, attn_mask=visible),
    "flash_attn_func, ours": flash_attn_func(q, k, v, causal=True).transpose(1, 2),
    "fa.attention": fa.attention(query, key, value, causal=True),  # or mask=visible
}
outputs = {name: module.out_proj(heads.transpose(1, 2).flatten(2)) for name, heads in attended.items()}
masks = dict(attn_mask=~visible, need_weights=False)  # this module hides where its mask is True
outputs["nn.MultiheadAttention"], _ = module(x, x, x, **masks)
outputs["nn.MultiheadAttention, converted"], _ = converted(x, x, x, **masks)

scores = query.double() @ key.double().mT / query.shape[-1] ** 0.5
exact = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value.double()).transpose(1, 2).flatten(2)
exact = F.linear(exact, module.out_proj.weight.double(), module.out_proj.bias.double())
print(f"values of up to {exact.abs().max():.2f}, and the largest difference from the formula in float64")
for name, output in outputs.items():
    difference = (output - exact).abs().max().item()
    print(f"{name:34}{difference:.0e}")
    assert difference < 1e-5, f"{name} computes something else"
