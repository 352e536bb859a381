"""Formulas as single autograd nodes. Each derivative of a formula, and its torch.vmap, is a single node, too.

torch runs a Function's `jvp` with forward mode off. If `jvp` used plain operations, an outer jvp would silently take
their tangents as zero. And torch.vmap of plain operations would number batches and heads wrongly for dropout.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.layout import arrange
from ..call.options import INPUTS, Call, inputs as inputs_of
from ..call.private import forward_level, has_storage, transforms_active
from ..naive.second import second_derivative, second_tangent
from .schema import RESULTS, save, saved
from .vmap_rule import vmap_rule

_GRADS = *(f"grad_{name}" for name in RESULTS), *(f"tangent_{name}" for name in INPUTS)
_TANGENTS = *(f"tangent_{name}" for name in INPUTS), *(f"moved_{name}" for name in INPUTS)


class Formula(NamedTuple):
    """A function that returns a tuple of tensors, and the names of its arguments and results for `vmap_rule`.

    The names include the fields of a Call. An elementwise function needs no names: torch.vmap maps it directly.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    names: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    def linear(self, transform: Callable, more: Sequence[str], results: Sequence[str]) -> "Formula":
        """Return `transform`, a derivative, as a Formula. Its arguments: `more`, in which it is linear, then self's."""
        # The number distinguishes the name of a tangent from the name of the tangent's own tangent.
        named = tuple(f"{len(self.names)}:{name}" for name in more)
        return Formula(transform, (*named, *self.names), tuple(results))


def recorded_batches(grads: Sequence[Any]) -> bool:
    """Return whether autograd records, and one of the gradients is a batch of is_grads_batched."""
    recording = torch.is_grad_enabled() and not transforms_active()
    return recording and any(x is not None and not has_storage(x) for x in grads)


def _check_kept(grads: Sequence[Any]) -> None:
    if forward_level() < 0 and recorded_batches(grads):
        why = "is_grads_batched with create_graph, of a second derivative, needs backend='naive', or torch.func"
        raise NotImplementedError(f"fusedattn: {why}")


def _at(names: Sequence[str], places: Sequence[int]) -> list[str]:
    return [names[place] for place in places] if names else []


def _function_of(formula: Formula, places: Sequence[int], arguments: Sequence[Any]) -> tuple[Callable, list[Any]]:
    """Return (the formula as a function of arguments[places] only, arguments[places])."""

    def some(*x):
        replaced = dict(zip(places, x, strict=True))
        return formula.compute(*(replaced.get(place, x) for place, x in enumerate(arguments)))

    return some, [arguments[place] for place in places]


def _jvp_of(formula: Formula, places: Sequence[int]) -> Formula:
    """Return the JVP of a formula: tangents of its results from tangents of arguments[places]."""

    def compute(*arguments):
        moved = arguments[: len(places)]
        some, primals = _function_of(formula, places, arguments[len(places) :])
        if forward_level() < 0 or transforms_active():
            return torch.func.jvp(some, tuple(primals), moved)[1]
        # torch cannot nest forward mode in an open dual_level, so take the VJP of the VJP, which is linear in `grads`.
        zeros = [torch.zeros_like(x) for x in some(*primals)]
        return torch.func.vjp(lambda *grads: torch.func.vjp(some, *primals)[1](grads), *zeros)[1](moved)

    return formula.linear(compute, _at(formula.names, places), formula.results)


def _vjp_of(formula: Formula, present: Sequence[int], places: Sequence[int]) -> Formula:
    """Return the VJP of a formula: gradients of arguments[places] from gradients of results[present]."""

    def compute(*arguments):
        some, primals = _function_of(formula, places, arguments[len(present) :])
        return torch.func.vjp(lambda *x: tuple(_at(some(*x), present)), *primals)[1](arguments[: len(present)])

    return formula.linear(compute, _at(formula.results, present), _at(formula.names, places))


class Derived(torch.autograd.Function):
    """Autograd node of a Formula, with derivatives of any order. `apply` takes the Formula and its arguments."""

    @staticmethod
    def forward(formula, *arguments):
        results = formula.compute(*arguments)
        return tuple(x.clone() if any(x is argument for argument in arguments) else x for x in results)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.formula, *arguments = inputs
        save(ctx, arguments)

    @staticmethod
    def backward(ctx, *grads):
        _check_kept(grads)
        arguments, _ = saved(ctx)
        places = [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        present = [n for n, grad in enumerate(grads) if grad is not None]
        if not (places and present):
            return None, *[None] * len(arguments)
        gradients = Derived.apply(_vjp_of(ctx.formula, present, places), *(grads[n] for n in present), *arguments)
        found = dict(zip(places, gradients, strict=True))
        return None, *map(found.get, range(len(arguments)))

    @staticmethod
    def jvp(ctx, _, *tangents):
        arguments, _ = saved(ctx)
        places = [place for place, x in enumerate(tangents) if x is not None]
        return Derived.apply(_jvp_of(ctx.formula, places), *(tangents[place] for place in places), *arguments)

    @staticmethod
    def vmap(info, in_dims, formula, *arguments):
        compute, names, results = formula
        if not names:
            mapped = torch.vmap(compute, in_dims[1:], randomness=info.randomness)(*arguments)
            return mapped, (0,) * len(mapped)
        return vmap_rule(lambda *x: Derived.apply(formula, *x), names, results, info, in_dims[1:], arguments)


_PLUS = Formula(lambda a, b: (a + b,))


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b as one autograd node; None stands for zero."""
    return b if a is None else a if b is None else Derived.apply(_PLUS, a, b)[0]


def double_backward(call: Call, incoming: Sequence[Any], grad_grads: Sequence[Any]) -> list[Tensor | None]:
    """Return `second_derivative`, computed as one autograd node. Gradients have their tensors' order of dimensions."""
    _check_kept(grad_grads)
    inputs = inputs_of(call)
    some = any(x is not None for x in incoming) and any(x is not None for x in grad_grads)
    places = [n for n, x in enumerate((*incoming, *inputs)) if some and x is not None]

    def compute(*arguments):
        incoming, moved, fields = arguments[:3], arguments[3 : len(_GRADS)], arguments[len(_GRADS) :]
        call = Call(*fields)
        grads, like = second_derivative(call, incoming, moved), (*incoming, *inputs_of(call))
        return tuple(arrange(grads[n], like[n]) for n in places)

    if not places:
        return [None] * len(_GRADS)
    formula = Formula(compute, (*_GRADS, *Call._fields), tuple(_at((*RESULTS, *INPUTS), places)))
    grads = dict(zip(places, Derived.apply(formula, *incoming, *grad_grads, *call), strict=True))
    return [grads.get(n) for n in range(len(_GRADS))]


def double_tangent(call: Call, tangents: Sequence[Any], moved: Sequence[Any], need_weights: bool) -> list:
    """Return `second_tangent` of (output, lse, weights or None), computed as one autograd node."""

    def compute(*arguments):
        tangents, moved = arguments[: len(INPUTS)], arguments[len(INPUTS) : len(_TANGENTS)]
        call = Call(*arguments[len(_TANGENTS) :])
        out, *rest = second_tangent(call, tangents, moved, need_weights)
        return arrange(out, call.query), *(x.contiguous() for x in rest if x is not None)

    formula = Formula(compute, (*_TANGENTS, *Call._fields), RESULTS[: 2 + need_weights])
    results = Derived.apply(formula, *tangents, *moved, *call)
    return [*results, *[None] * (3 - len(results))]
