"""Calls with one mistake, of kinds that the contract names: they raise, in one line that begins with its argument."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

import fusedattn as fa

from . import strategies
from .dense import Dense
from .held import Wrong
from .layouts import shown

NAN, INFINITE = float("nan"), float("inf")


def _ones(*shape, dtype=torch.bool):
    return torch.ones(shape, dtype=dtype)


# {argument: {what is wrong: (case, tensors) -> the argument}}, whatever the call.
MISTAKES = {
    "mask": {
        "int": lambda c: _ones(c.Sq, c.Sk, dtype=torch.int32),
        "float": lambda c: _ones(c.Sq, c.Sk, dtype=torch.float32),
        "rank 3": lambda c: _ones(1, c.Sq, c.Sk),
        "longer": lambda c: _ones(c.Sq, c.Sk + 2),
        "list": lambda c: [[True]],
        "sparse": lambda c: _ones(c.Sq, c.Sk).to_sparse(),
        "meta": lambda c: _ones(c.Sq, c.Sk).to("meta"),
    },
    "bias": {
        "bool": lambda c: _ones(c.Sq, c.Sk),
        "int": lambda c: _ones(c.Sq, c.Sk, dtype=torch.int64),
        "complex": lambda c: _ones(c.Sq, c.Sk, dtype=torch.complex64),
        "longer": lambda c: _ones(c.Sq + 2, c.Sk, dtype=torch.float32),
        "rank 1": lambda c: _ones(c.Sk, dtype=torch.float32),
        "number": lambda c: 1.0,
    },
    "key_mask": {
        "float": lambda c: _ones(c.Sk, dtype=torch.float32),
        "longer": lambda c: _ones(c.Sk + 1),
        "rank 3": lambda c: _ones(1, 1, c.Sk),
        "batches": lambda c: _ones(c.B + 2, c.Sk),
    },
    "query_mask": {
        "int": lambda c: _ones(c.Sq, dtype=torch.uint8),
        "longer": lambda c: _ones(c.Sq + 1),
        "tuple": lambda c: (True,),
    },
    "causal": {repr(x): lambda c, x=x: x for x in (1, 0, None, "yes", torch.tensor(True))},
    "window": {
        repr(x): lambda c, x=x: x
        for x in ((-1, 0), (1,), 3, (1.5, None), (True, None), ("a", 1), (1, 2, 3), (None, -5))
    },
    "align": {repr(x): lambda c, x=x: x for x in ("left", None, 3, "", b"top_left")},
    "scale": {repr(x): lambda c, x=x: x for x in (NAN, INFINITE, -INFINITE, "1", True, 1j, [1.0], 10**400)},
    "softcap": {repr(x): lambda c, x=x: x for x in (NAN, INFINITE, 0, -1.0, "1", False)},
    "alibi_slopes": {
        "int": lambda c: _ones(c.Hq, dtype=torch.int64),
        "longer": lambda c: _ones(c.Hq + 1, dtype=torch.float32),
        "number": lambda c: 0.5,
        "batches": lambda c: _ones(c.B + 1, c.Hq, dtype=torch.float32),
    },
    "sinks": {
        "bool": lambda c: _ones(c.Hq),
        "rank 2": lambda c: _ones(1, c.Hq, dtype=torch.float32),
        "longer": lambda c: _ones(c.Hq + 1, dtype=torch.float32),
    },
    "dropout_p": {repr(x): lambda c, x=x: x for x in (-0.1, 1.1, NAN, "0.5", True, INFINITE, None)},
    "seed": {
        repr(x): lambda c, x=x: x for x in (1.5, 2**63, -(2**63) - 1, "7", torch.tensor(1.0), torch.tensor([1, 2]))
    },
    "backend": {repr(x): lambda c, x=x: x for x in ("cuda", "", 3, "Triton")},
    "return_lse": {repr(x): lambda c, x=x: x for x in (1, None, "no")},
    "return_weights": {repr(x): lambda c, x=x: x for x in (0, None, [])},
    "query": {
        "int": lambda c: _ones(c.B, c.Hq, c.Sq, c.D, dtype=torch.int64),
        "complex": lambda c: _ones(c.B, c.Hq, c.Sq, c.D, dtype=torch.complex64),
        "list": lambda c: [1.0],
        "no columns": lambda c: torch.ones(c.B, c.Hq, c.Sq, 0, dtype=c.dtype),
        "rank 1": lambda c: torch.ones(3, dtype=c.dtype),
        "rank 5": lambda c: torch.ones(1, c.B, c.Hq, c.Sq, c.D, dtype=c.dtype),
        "sparse": lambda c: torch.ones(c.B, c.Hq, c.Sq, c.D, dtype=c.dtype).to_sparse(),
    },
    "key": {
        "dtype": lambda c: torch.ones(
            c.B, c.Hkv, c.Sk, c.D, dtype=torch.float64 if c.dtype != torch.float64 else torch.float32
        ),
        "heads": lambda c: torch.ones(c.B, 7 * c.Hq + 1 if c.Hq else 2, c.Sk, c.D, dtype=c.dtype),
        "wider": lambda c: torch.ones(c.B, c.Hkv, c.Sk, c.D + 1, dtype=c.dtype),
        "batches": lambda c: torch.ones(c.B + 1, c.Hkv, c.Sk, c.D, dtype=c.dtype),
        "rank 3": lambda c: torch.ones(c.Hkv, c.Sk, c.D, dtype=c.dtype),
        "meta": lambda c: torch.ones(c.B, c.Hkv, c.Sk, c.D, dtype=c.dtype, device="meta"),
    },
    "value": {
        "longer": lambda c: torch.ones(c.B, c.Hkv, c.Sk + 1, c.Dv, dtype=c.dtype),
        "dtype": lambda c: torch.ones(c.B, c.Hkv, c.Sk, c.Dv, dtype=torch.int32),
        "no columns": lambda c: torch.ones(c.B, c.Hkv, c.Sk, 0, dtype=c.dtype),
        "None": lambda c: None,
    },
}
# The rules of two calls may name another argument of the two that do not go together.
TOGETHER = {"query": ("query", "key"), "key": ("key", "value"), "value": ("value",)}


class Mistaken(NamedTuple):
    case: Dense
    argument: str
    mistake: str
    backend: str | None

    __repr__ = shown


@st.composite
def calls(draw, name):
    case = draw(strategies.calls("attention"))._replace(planned=False, forward=False)
    argument = draw(st.sampled_from(sorted(MISTAKES)))
    mistake = draw(st.sampled_from(sorted(MISTAKES[argument])))
    return Mistaken(case, argument, mistake, draw(st.sampled_from([None, "triton", "cpu", "naive"])))


def hold(drawn, tally=None):
    case, argument = drawn.case, drawn.argument
    tensors, options = case.draw()
    given = {name: tensors[name] for name in ("query", "key", "value")} | options | dict(backend=drawn.backend)
    given[argument] = MISTAKES[argument][drawn.mistake](case)
    if argument in ("key_mask", "query_mask") and drawn.mistake == "longer" and case.B == 0:
        return
    try:
        fa.attention(**given)
    except (ValueError, TypeError) as error:
        text = str(error)
        named = text.split(":")[0]
        if (
            "\n" in text
            or named not in TOGETHER.get(argument, (argument,))
            and named not in ("key", "value", "mask", "bias")
        ):
            raise Wrong(f"not one line that begins with {argument}: {text!r}") from error
        return
    raise Wrong(f"{argument}: {drawn.mistake} was taken")
