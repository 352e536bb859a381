"""Named attention calls that `fusedattn check` compares with eager PyTorch."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..api import attention
from .compare import INPUTS, LEARNED, compare as held, with_gradients
from .tolerance import Verdict


class Case(NamedTuple):
    """A named attention call: its options, and sizes that suit Triton's interpreter."""

    name: str  # without a comma, which separates names on the command line
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    rows: int = 37
    keys: int = 37
    dim: int = 16
    value_dim: int = 16
    options: dict = {}
    drawn: tuple[str, ...] = ()  # options that are random tensors
    views: bool = False  # if True, inputs and the gradient of out are not contiguous
    grads: str = "out and lse"  # results that the loss depends on

    def grown(self) -> "Case":
        """Return the case in sizes that suit a GPU; odd lengths stay odd."""
        factors = dict(batch=3, heads=3, kv_heads=3, rows=11, keys=11, dim=4, value_dim=4)
        return self._replace(**{name: factor * getattr(self, name) for name, factor in factors.items()})

    def draw(self, device: str, dtype: torch.dtype) -> tuple[dict, dict]:
        """Draw (tensors, options). tensors: query, key, value, gradients of out, lse, weights; NaN at hidden tokens."""
        dice = torch.Generator().manual_seed(sum(map(ord, self.name)))
        wide = torch.promote_types(dtype, torch.float32)
        batch, heads, rows, keys = self.batch, self.heads, self.rows, self.keys
        kv, of_rows = (batch, self.kv_heads, keys), (batch, heads, rows)
        sizes: dict[str, tuple] = dict(query=(*of_rows, self.dim), key=(*kv, self.dim), value=(*kv, self.value_dim))
        sizes |= dict(out=(*of_rows, self.value_dim), lse=of_rows, weights=(*of_rows, keys))
        masks = dict(mask=(batch, 1, rows, keys), key_mask=(batch, keys), query_mask=(batch, rows))
        scores = dict(bias=(1, heads, rows, keys), alibi_slopes=(heads,), sinks=(heads,))
        drawn = {name: torch.randn(size, generator=dice) for name, size in sizes.items()}
        seen = {name: torch.rand(size, generator=dice) < 0.7 for name, size in masks.items() if name in self.drawn}
        learned = {name: torch.randn(size, generator=dice) for name, size in scores.items() if name in self.drawn}
        for mask, names in (("key_mask", ("key", "value")), ("query_mask", ("query", "out", "lse", "weights"))):
            for name in names if mask in seen else ():
                hidden = ~seen[mask][:, None]
                drawn[name] = drawn[name].masked_fill(hidden if name == "lse" else hidden[..., None], float("nan"))
        tensors = {name: x.to(device, wide if name == "lse" else dtype) for name, x in drawn.items()}
        if self.views:
            tensors = tensors | {name: layout(tensors[name]) for name, layout in _LAYOUTS.items()}
        options = {name: x.to(device) for name, x in seen.items()}
        return tensors, self.options | options | {name: x.to(device, dtype) for name, x in learned.items()}


_LAYOUTS: dict[str, Callable] = {
    "query": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # (B, S, H, D) in memory, as projections are
    "key": lambda x: torch.stack((x, x), -1)[..., 0],  # every second element
    "value": lambda x: torch.cat((x, x, x), 2)[:, :, x.shape[2] : 2 * x.shape[2]],  # a slice, at an offset
    "out": lambda x: x.mT.contiguous().mT,  # columns are contiguous
}

CASES = (
    Case("plain", heads=2, kv_heads=2),
    Case("causal", options=dict(causal=True)),
    Case("causal more keys", rows=19, keys=53, options=dict(causal=True)),
    Case("causal top left", rows=19, keys=53, options=dict(causal=True, align="top_left")),
    Case("window", rows=41, keys=41, options=dict(window=(7, 3))),
    Case("one kv head for 3", heads=3, kv_heads=1),
    Case("value wider", dim=8, value_dim=40),
    Case("odd sizes", rows=33, keys=17, dim=5, value_dim=9),
    Case("one row", rows=1, keys=45),
    Case("mask", batch=2, drawn=("mask",)),
    Case("padding", batch=2, drawn=("key_mask", "query_mask")),
    Case("empty rows", rows=45, keys=19, options=dict(causal=True)),
    Case("scale 0", options=dict(scale=0.0)),
    Case("scale < 0", options=dict(scale=-0.4)),
    Case("views", heads=2, kv_heads=2, options=dict(causal=True), views=True),
    Case("loss without lse", grads="out"),
    Case("bias", batch=2, heads=2, kv_heads=1, drawn=("bias",)),
    Case("softcap", options=dict(softcap=2.0)),
    Case("slopes and sinks", heads=2, kv_heads=2, drawn=("alibi_slopes", "sinks")),
    Case("dropout", batch=2, options=dict(dropout_p=0.3, seed=1234567890123)),
    Case("weights", drawn=("mask",), options=dict(dropout_p=0.3, seed=5), grads="out, lse and weights"),
)
RESULTS = {name: name for name in ("out", "lse", "weights")} | {name: f"d {name}" for name in (*INPUTS, *LEARNED)}
RESULTS["alibi_slopes"] = "d slopes"


def compare(case: Case, backend: str, device: str, dtype: torch.dtype) -> dict[str, Verdict]:
    tensors, options = case.draw(device, dtype)
    return held(with_gradients(attention, tensors, options, case.grads, backend=backend), tensors, options, case.grads)
