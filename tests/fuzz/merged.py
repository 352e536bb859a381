"""`merge` of any two results, held to float64."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

import fusedattn as fa
from fusedattn.testing.tolerance import verdict

from .held import Wrong
from .layouts import PLAIN, Layout, lay, memory, shown
from .strategies import DTYPES, layouts


class Merged(NamedTuple):
    shape: tuple = (1,)
    dtype: torch.dtype = torch.float32
    out_a: Layout = PLAIN
    out_b: Layout = PLAIN
    lse_a: Layout = PLAIN
    lse_b: Layout = PLAIN
    level: float = 0.0  # of both lse
    apart: float = 1.0
    empty: float = 0.0  # the share of rows that saw nothing, on each side
    values: int = 0

    __repr__ = shown

    def draw(self):
        dice = torch.Generator().manual_seed(self.values)
        wide, made = torch.promote_types(self.dtype, torch.float32), []
        for side in "ab":
            out = torch.randn(self.shape, generator=dice).to(self.dtype)
            lse = (torch.randn(self.shape[:-1], generator=dice) * self.apart + self.level).to(wide)
            seen = torch.rand(self.shape[:-1], generator=dice) >= self.empty
            out, lse = out.masked_fill(~seen[..., None], 0.0), lse.masked_fill(~seen, float("-inf"))
            made += [lay(out, getattr(self, f"out_{side}")), lay(lse, getattr(self, f"lse_{side}"))]
        return made


@st.composite
def calls(draw, name):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 7, 0]), max_size=4))) + (
        draw(st.sampled_from([1, 5, 16, 0])),
    )
    made = dict(shape=shape, dtype=draw(st.sampled_from(DTYPES)), values=draw(st.integers(0, 999)))
    made |= {each: draw(layouts()) for each in ("out_a", "out_b", "lse_a", "lse_b")}
    made |= dict(
        level=draw(st.sampled_from([0.0, 100.0, -1e4, 1e30, -1e30])), apart=draw(st.sampled_from([1.0, 0.0, 20.0, 1e4]))
    )
    return Merged(**made, empty=draw(st.sampled_from([0.0, 0.3, 1.0])))


def _formula(out_a, lse_a, out_b, lse_b):
    lse = torch.stack([lse_a, lse_b], -1)
    empty = (lse == float("-inf")).all(-1)
    top = lse.amax(-1).detach().masked_fill(empty, 0.0)  # without it logsumexp's gradient is that of a rounded sum
    total = top + (lse - top[..., None]).exp().sum(-1).masked_fill(empty, 1.0).log()
    total, weights = total.masked_fill(empty, float("-inf")), lse.softmax(-1).masked_fill(empty[..., None], 0.0)
    out = out_a.to(lse.dtype) * weights[..., :1] + out_b.to(lse.dtype) * weights[..., 1:]
    return out.to(out_a.dtype), total


def _computed(function, tensors, dtype):
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*tensors)
    dice = torch.Generator().manual_seed(3)
    given = [torch.randn(x.shape, generator=dice).to(dtype).to(x.dtype) for x in (out, lse)]
    given[1] = given[1].masked_fill(lse == float("-inf"), 0.0)
    grads = torch.autograd.grad((out, lse), tensors, given, materialize_grads=True)
    names = "out", "lse", "d out_a", "d lse_a", "d out_b", "d lse_b"
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))


def hold(case, tally=None):
    tensors = case.draw()
    before = [memory(x) for x in tensors]
    got = _computed(fa.merge, tensors, case.dtype)
    if not all(torch.equal(memory(x), was) for x, was in zip(tensors, before, strict=True)):
        raise Wrong("an input changed")
    near, right = (
        _computed(_formula, tensors, case.dtype),
        _computed(_formula, [x.double() for x in tensors], case.dtype),
    )
    other = fa.merge(*(x.detach() for x in (tensors[2:] + tensors[:2])))
    if not all(torch.equal(a, got[name]) for a, name in zip(other, ("out", "lse"), strict=True)):
        raise Wrong("the order of the sides matters")
    wrong = {}
    for name, x in got.items():
        if x.dim() == 0:
            continue
        eager, oracle = near[name], right[name].masked_fill(right[name].isnan(), 0.0)  # of rows that see nothing
        eager = eager.masked_fill(eager.isnan(), 0.0)
        zero = torch.zeros(x.shape[:-1], dtype=torch.bool)
        result = verdict(x, eager, oracle, zero, max(1.0, case.shape[-1] ** 0.5))
        if not result.ok:
            wrong[name] = result.why
    if wrong:
        raise Wrong(str(wrong))
