"""Modules with projections, ours and torch's by us, held to the naive path in float64, or to torch's own module."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

import fusedattn as fa
from fusedattn import modules, reference
from fusedattn.compat import torch as compat
from fusedattn.testing.tolerance import verdict

from .held import OTHERS, Wrong
from .layouts import memory, shown
from .strategies import rarely

SIZES = st.sampled_from([1, 2, 3, 5, 8, 15, 17, 33, 40])


class Module(NamedTuple):
    """A module by its class and arguments, its inputs, and what is asked of it."""

    kind: str
    made: dict  # arguments of the constructor
    B: int | None = 1
    Sq: int = 1
    Sk: int = 1
    dtype: torch.dtype = torch.float32
    masks: dict = {}  # {name: (kind, shape letters of "bhij", keep)}
    shares: str = ""  # "key": key is query, and value with it; "value": value is key
    need_weights: bool = False
    average: bool = True
    training: bool = True
    values: int = 0

    __repr__ = shown

    def module(self, dtype, backend=None):
        torch.manual_seed(self.values)
        classes = {"MultiHeadAttention": fa.MultiHeadAttention, "SelfAttention": fa.SelfAttention}
        classes |= {"torch's": nn.MultiheadAttention, "MultiheadAttention": compat.MultiheadAttention}
        layer = classes[self.kind](**self.made)
        with torch.no_grad():
            for x in layer.parameters():
                x.add_(torch.randn(x.shape) * 0.1)
        return layer.to(self.dtype).to(dtype).train(self.training)

    def draw(self, dtype):
        """([query, key, value], masks): of MultiheadAttention as torch has them."""
        dice, made = torch.Generator().manual_seed(self.values), self.made
        E, H = made["embed_dim"], made.get("num_heads", 1)
        theirs = self.kind in ("MultiheadAttention", "torch's")

        def inputs(length, width):
            shape = [] if self.B is None else [self.B]
            shape.insert(1 if made.get("batch_first") or not theirs else 0, length)
            return torch.randn(*shape, width, generator=dice).to(self.dtype).to(dtype).requires_grad_()

        query = inputs(self.Sq, E)
        key = query if self.shares == "key" else inputs(self.Sk, made.get("kdim") or E)
        value = key if self.shares else inputs(self.Sk, made.get("vdim") or E)
        sizes, masks = dict(b=self.B or 1, h=H, i=self.Sq, j=self.Sk), {}
        for name, (kind, axes, keep) in self.masks.items():
            shape = tuple(sizes[axis] for axis in axes) if axes != "N" else (sizes["b"] * H, self.Sq, self.Sk)
            seen = torch.rand(shape, generator=dice) < keep
            noise = torch.randn(shape, generator=dice).to(self.dtype).to(dtype)
            masks[name] = (~seen if theirs else seen) if kind == "bool" else noise.masked_fill(~seen, float("-inf"))
        return [query, key, value], masks

    def results(self, dtype, backend):
        """{name: output, weights and gradients}."""
        layer = self.module(dtype)
        (query, key, value), masks = self.draw(dtype)
        before = {name: memory(x) for name, x in (("query", query), ("key", key), ("value", value), *masks.items())}
        torch.manual_seed(self.values)
        with fa.use_backend(backend):
            if self.kind == "SelfAttention":
                out, weights = layer(query, **masks, need_weights=self.need_weights)
            elif self.kind == "MultiHeadAttention":
                given = () if self.shares == "key" else (key,) if self.shares else (key, value)
                out, weights = layer(query, *given, **masks, need_weights=self.need_weights)
            else:
                more = dict(need_weights=self.need_weights, average_attn_weights=self.average)
                out, weights = layer(query, key, value, **masks, **more)
            found = dict(out=out) | ({} if weights is None else dict(weights=weights))
            dice = torch.Generator().manual_seed(1)
            given = [torch.randn(x.shape, generator=dice).to(self.dtype).to(dtype) for x in found.values()]
            inputs = dict(query=query, key=key, value=value) if self.kind != "SelfAttention" else dict(query=query)
            inputs |= dict(layer.named_parameters())
            leaves = list({id(x): x for x in inputs.values()}.values())
            grads = torch.autograd.grad(list(found.values()), leaves, given, materialize_grads=True)
        by = {id(x): grad for x, grad in zip(leaves, grads, strict=True)}
        for name, x in (("query", query), ("key", key), ("value", value), *masks.items()):
            if not torch.equal(memory(x), before[name]):
                raise Wrong(f"{backend}: {name} changed")
        return {name: x.detach() for name, x in found.items()} | {name: by[id(x)] for name, x in inputs.items()}

    def oracle(self):
        """In float64: torch's own where that has an answer, else ours by the naive path."""
        if self.kind == "MultiheadAttention" and not (self.training and self.made.get("dropout")):
            found = self._replace(kind="torch's").results(torch.float64, None)
            if not any(x.isnan().any() for x in found.values()):
                return found
        return self.results(torch.float64, "naive")


@st.composite
def calls(draw, name):
    H, width = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([8, 1, 5, 16, 17]))
    E, made = H * width, {}
    widths = st.sampled_from([None, 6, 17])
    B, Sq, Sk = draw(st.sampled_from([1, 2, 3])), draw(SIZES), draw(SIZES)
    made = dict(embed_dim=E, bias=draw(st.booleans()), dropout=rarely(draw, st.sampled_from([0.3, 1.0]), 0.0))
    kinds, shares = st.sampled_from(["bool", "float"]), draw(st.sampled_from(["", "key", "value"]))
    keeps = st.sampled_from([0.7, 1.0, 0.3, 0.0])
    masks = {}
    if name == "SelfAttention":
        shares, Sk = "key", Sq
        made["scale"] = rarely(draw, st.sampled_from([0.0, 1.0, -0.3]))
        axes = dict(mask=["ij", "bij"], key_mask=["bj"])
        for each, shapes in axes.items():
            if draw(st.booleans()):
                masks[each] = "bool", draw(st.sampled_from(shapes)), draw(keeps)
    elif name == "MultiHeadAttention":
        made |= dict(num_heads=H, kdim=draw(widths), vdim=draw(widths), causal=draw(st.booleans()))
        made["num_kv_heads"] = draw(st.sampled_from([n for n in (H, 1, 2) if H % n == 0]))
        made |= dict(head_dim=draw(st.sampled_from([None, 4, 33])), value_head_dim=draw(st.sampled_from([None, 3, 20])))
        made["window"] = rarely(draw, st.sampled_from([(3, 1), (None, 2), (0, 0)]))
        made["softcap"] = rarely(draw, st.sampled_from([2.0, 30.0]))
        made["scale"] = rarely(draw, st.sampled_from([0.0, 1.0, -0.3]))
        axes = dict(mask=["ij", "bij", "bhij"], bias=["ij", "bij", "bhij"], key_mask=["bj"], query_mask=["bi"])
        for each, shapes in axes.items():
            if draw(st.integers(0, 2)) == 2:
                masks[each] = "float" if each == "bias" else "bool", draw(st.sampled_from(shapes)), draw(keeps)
    else:
        made |= dict(num_heads=H, kdim=draw(widths), vdim=draw(widths), batch_first=draw(st.booleans()))
        made |= dict(add_bias_kv=draw(st.booleans()), add_zero_attn=draw(st.booleans()))
        B = draw(st.sampled_from([1, 2, 3, None]))
        if draw(st.booleans()):
            masks["attn_mask"] = draw(kinds), draw(st.sampled_from(["ij", "N"])), draw(keeps)
        if draw(st.booleans()):
            masks["key_padding_mask"] = draw(kinds), "j" if B is None else "bj", draw(keeps)
    if shares == "key":
        made, Sk = {**made, **{x: None for x in ("kdim", "vdim") if x in made}}, Sq
    if shares == "value" and "kdim" in made:
        made["vdim"] = made["kdim"]
    if (B or 1) * H * Sq * Sk > 2000:
        B = B and 1
    if H * Sq * Sk > 3000:
        Sk = Sq if shares == "key" else 3
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    if dtype.itemsize == 2 and made["dropout"] < 1.0:
        made["dropout"] = 0.0  # a row that sees one key through it has a gradient of rounding alone
    more = dict(need_weights=draw(st.booleans()), average=draw(st.booleans()), training=draw(st.booleans()))
    return Module(name, made, B, Sq, Sk, dtype, masks, shares, **more, values=draw(st.integers(0, 99)))


def _judged(found, eager, oracle):
    wrong, terms = {}, max(x.norm().item() for each in oracle for x in each.values())
    for name in oracle[0]:
        if name == "k_proj.bias" and found[0][name].dtype == torch.bfloat16:
            continue  # it is 0, but for what rounding leaves of a sum
        got, near, right = (torch.stack([x[name] for x in each]) for each in (found, eager, oracle))
        unknown = torch.zeros(right.shape[:-1], dtype=torch.bool)
        result = verdict(got, near, right, unknown, max(1.0, terms))
        if not result.ok:
            wrong[name] = result.why
    return wrong


def _eager(case):
    """The results with every step in the dtype of the inputs."""
    kept = modules.attention
    modules.attention = lambda *tensors, backend=None, **options: reference.eager(*tensors, **options)
    try:
        return case.results(case.dtype, None)
    finally:
        modules.attention = kept


def hold(case, tally=None):
    for backend in ("triton", None):
        found = case.results(case.dtype, backend)
        eager, oracle = _eager(case), case.oracle()
        wrong = _judged([found], [eager], [oracle])
        if wrong and all("error" in why for why in wrong.values()):
            if tally is not None:
                tally["drawn again"] = tally.get("drawn again", 0) + 1
            cases = [case._replace(values=case.values + 1000 * n) for n in range(OTHERS + 1)]
            every = [x.results(case.dtype, backend) for x in cases]
            wrong = _judged(every, list(map(_eager, cases)), [x.oracle() for x in cases])
        if wrong:
            raise Wrong(f"{backend}: {wrong}")
