"""Random modules, ours and our drop-in for torch's, compared with float64 or with torch's own module."""

from typing import NamedTuple
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn

import fusedattn as fa
from fusedattn import reference
from fusedattn.compat import torch as compat
from fusedattn.layers import attention as modules
from fusedattn.testing.tolerance import verdict

from .held import hold_draws
from .layouts import shown
from .strategies import rarely

MODULES = {"MultiHeadAttention": fa.MultiHeadAttention, "MultiheadAttention": compat.MultiheadAttention}
SIZES = st.sampled_from([1, 2, 3, 5, 8, 15, 17, 33, 40])
KEEPS = st.sampled_from([0.7, 1.0, 0.3, 0.0])


class Module(NamedTuple):
    """One random module: its class and arguments, and the sizes, masks and results of its call."""

    kind: str
    made: dict  # arguments of the constructor
    B: int = 1
    Sq: int = 1
    Sk: int = 1
    dtype: torch.dtype = torch.float32
    masks: dict = {}  # {name: (kind, shape letters of "bhij", keep)}
    need_weights: bool = False
    training: bool = True
    values: int = 0

    __repr__ = shown

    def results(self, dtype, backend, kind=None):
        torch.manual_seed(self.values)
        layer = (nn.MultiheadAttention if kind == "torch's" else MODULES[self.kind])(**self.made)
        with torch.no_grad():
            for x in layer.parameters():
                x.add_(torch.randn(x.shape) * 0.1)
        layer = layer.to(self.dtype).to(dtype).train(self.training)
        dice, theirs = torch.Generator().manual_seed(self.values), self.kind == "MultiheadAttention"

        def drawn(*shape):
            return torch.randn(*shape, generator=dice).to(self.dtype).to(dtype)

        E, H = self.made["embed_dim"], self.made["num_heads"]
        widths = self.made.get("kdim") or E, self.made.get("vdim") or E
        inputs = [drawn(self.B, n, width) for n, width in zip((self.Sq, self.Sk, self.Sk), (E, *widths), strict=True)]
        query, key, value = (x.requires_grad_() for x in inputs)
        sizes, masks = dict(b=self.B, h=H, i=self.Sq, j=self.Sk), {}
        for name, (values, axes, keep) in self.masks.items():
            shape = (self.B * H, self.Sq, self.Sk) if axes == "N" else [sizes[axis] for axis in axes]
            seen, noise = torch.rand(shape, generator=dice) < keep, drawn(*shape)
            masks[name] = noise.masked_fill(~seen, float("-inf")) if values == "float" else ~seen if theirs else seen
        torch.manual_seed(self.values)
        with fa.use_backend(backend):
            out, weights = layer(query, key, value, **masks, need_weights=self.need_weights)
            found = dict(out=out) | ({} if weights is None else dict(weights=weights))
            dice = torch.Generator().manual_seed(1)
            given = [drawn(*x.shape) for x in found.values()]
            leaves = dict(query=query, key=key, value=value) | dict(layer.named_parameters())
            grads = torch.autograd.grad(list(found.values()), list(leaves.values()), given, materialize_grads=True)
        return {name: x.detach() for name, x in found.items()} | dict(zip(leaves, grads, strict=True))

    def oracle(self):
        """Return float64 results of torch's module, or of ours by the naive path if torch's have NaN or dropout."""
        if self.kind == "MultiheadAttention" and not (self.training and self.made["dropout"]):
            found = self.results(torch.float64, None, "torch's")
            if not any(x.isnan().any() for x in found.values()):
                return found
        return self.results(torch.float64, "naive")

    def eager(self):
        def attention(*tensors, backend=None, **options):
            return reference.eager(*tensors, **options)

        with mock.patch.object(modules, "attention", attention):
            return self.results(self.dtype, None)


@st.composite
def calls(draw, name):
    H, width = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([8, 1, 5, 16, 17]))
    widths = st.sampled_from([None, 6, 17])
    made = dict(embed_dim=H * width, num_heads=H, kdim=draw(widths), vdim=draw(widths), bias=draw(st.booleans()))
    made["dropout"] = rarely(draw, st.sampled_from([0.3, 1.0]), 0.0)
    B, Sq, Sk = draw(st.sampled_from([1, 2, 3])), draw(SIZES), draw(SIZES)
    if name == "MultiHeadAttention":
        kv_heads = st.sampled_from([n for n in (H, 1, 2) if H % n == 0])
        made |= dict(causal=draw(st.booleans()), num_kv_heads=draw(kv_heads))
        made |= dict(head_dim=draw(st.sampled_from([None, 4, 33])), value_head_dim=draw(st.sampled_from([None, 3, 20])))
        made["window"] = rarely(draw, st.sampled_from([(3, 1), (None, 2), (0, 0)]))
        made["softcap"] = rarely(draw, st.sampled_from([2.0, 30.0]))
        made["scale"] = rarely(draw, st.sampled_from([0.0, 1.0, -0.3]))
        shapes = dict(mask=["ij", "bij", "bhij"], bias=["ij", "bij", "bhij"], key_mask=["bj"], query_mask=["bi"])
        kinds = dict(bias="float")
    else:
        made |= dict(batch_first=True, add_bias_kv=draw(st.booleans()), add_zero_attn=draw(st.booleans()))
        shapes = dict(attn_mask=["ij", "N"], key_padding_mask=["bj"])
        kinds = dict.fromkeys(shapes, draw(st.sampled_from(["bool", "float"])))
    if B * H * Sq * Sk > 2000:
        B, Sk = 1, min(Sk, 17)
    masks = {
        name: (kinds.get(name, "bool"), draw(st.sampled_from(axes)), draw(KEEPS))
        for name, axes in shapes.items()
        if draw(st.integers(0, 2)) == 2
    }
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    if dtype.itemsize == 2 and made["dropout"] < 1.0:
        made["dropout"] = 0.0  # with one key left, the gradient of a row would be only rounding
    more = dict(need_weights=draw(st.booleans()), training=draw(st.booleans()), values=draw(st.integers(0, 99)))
    return Module(name, made, B, Sq, Sk, dtype, masks, **more)


def _judged(draws):
    found, eager, oracle = zip(*draws, strict=True)
    wrong, terms = {}, max(x.norm().item() for each in oracle for x in each.values())
    for name in oracle[0]:
        if name == "k_proj.bias" and found[0][name].dtype == torch.bfloat16:
            continue  # this gradient is only rounding
        got, near, right = (torch.stack([x[name] for x in each]) for each in (found, eager, oracle))
        unknown = torch.zeros(right.shape[:-1], dtype=torch.bool)
        result = verdict(got, near, right, unknown, max(1.0, terms))
        if not result.ok:
            wrong[name] = result.why
    return wrong


def hold(case):
    def compute(backend, n):
        drawn = case._replace(values=case.values + 1000 * n)
        return drawn.results(case.dtype, backend), drawn.eager(), drawn.oracle()

    hold_draws(compute, _judged)
