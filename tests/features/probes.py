"""Asks a package for a feature, and holds its answer to float64."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from fusedattn import reference
from fusedattn.testing.compare import INPUTS, LEARNED, compare, in_float64, with_gradients
from fusedattn.testing.tolerance import verdict, verdicts

LENGTHS = 7, 12  # of packed sequences, and how much of a cache is filled
PAGE = 4


class Lacks(Exception):
    """A package has no argument for what is asked."""


class Package(NamedTuple):
    """How a package is called.

    Args:
        attend: function of query, key, value and the options of `fusedattn.attention`, which returns a tuple
            (output[, lse][, weights]); it raises Lacks for those that the package has no argument for.
        packed: function of query, key, value (T, H, D) and offsets. cached: function of query (B, Hq, 1, D), keys and
            values (B, Hkv, C, D), of which so many (B,) are filled, and one more is new: puts them in pages, adds the
            new one by the package's own means, and attends. None: there is no such function.
        paths: {word: what makes the package take a path}, the fused one first.
    """

    name: str
    attend: Callable
    packed: Callable | None = None
    cached: Callable | None = None
    paths: dict[str, Callable] = {"yes": contextlib.nullcontext}  # noqa: RUF012
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def asked(package, feature, forward=False):
    """What is wrong with what a package answers, "" if nothing. Raises what the package raises.

    Args: forward: whether to ask for results alone, without gradients.
    """
    answers, lacks = [], None
    for case in feature.cases:
        try:
            answers.append(WAYS[feature.way](package, feature, case, forward))
        except Lacks as error:
            lacks = error  # that counts where it can be asked for no other case
    if not answers:
        raise lacks
    return next(filter(None, answers), "")


def _drawn(package, case, finite=True):
    """(tensors, options) of a case; finite: what a key mask hides is 0, and not NaN."""
    tensors, options = case._replace(dtype=package.dtype).draw(package.device)
    if finite:
        tensors = {name: x.nan_to_num(0, 0, 0) for name, x in tensors.items()}
    asked_for = {name: x for name, x in options.items() if isinstance(x, torch.Tensor) or x}
    return tensors, {name: x for name, x in asked_for.items() if name != "align"}  # all are as they are by default


def _why(found):
    return next((f"{name}: {one.why}" for name, one in found.items() if not one.ok), "")


def _call(package, feature, case, forward, finite=True, lse=False):
    tensors, options = _drawn(package, case, finite)
    need_lse, need_weights = lse or "lse" in feature.grads, "weights" in feature.grads

    def attend(query, key, value, return_lse, return_weights, **more):
        out, *rest = package.attend(query, key, value, return_lse=need_lse, return_weights=need_weights, **more)
        if need_lse:
            return out, *rest
        _, known = reference.attention(query.detach(), key.detach(), value.detach(), return_lse=True, **options)
        return out, known, *rest

    if not forward:
        got = with_gradients(attend, tensors, options, feature.grads, feature.learned)
        return _why(compare(got, tensors, options, feature.grads))
    exact = in_float64({name: x for name, x in options.items() if name in LEARNED})
    names = "out", "lse"
    flags = dict(return_lse=True, return_weights=False)
    inputs = {name: tensors[name] for name in INPUTS}
    results = (
        attend(**inputs, **options, **flags),
        reference.eager(**inputs, **options, return_lse=True),
        reference.attention(**in_float64(inputs), **options | exact, return_lse=True),
    )
    return _why(verdicts(*(dict(zip(names, each, strict=False)) for each in results)))


def _padding(package, feature, case, forward):
    return _call(package, feature, case, forward, finite=False)


def _lse(package, feature, case, forward):
    return _call(package, feature, case, forward, lse=True)


def _judged(got, results, tensors, formula=lambda attention: attention):
    """Holds results(function, tensors) of a package to those of formula(a function like `reference.attention`)."""
    eager, oracle = (
        results(formula(reference.eager), tensors),
        results(formula(reference.attention), in_float64(tensors)),
    )
    return _why(verdicts(got, eager, oracle))


def _out(package):
    return lambda *inputs: package.attend(*inputs, return_lse=False, return_weights=False)[0]


def _results(forward):
    """results(function, tensors) of output and gradients; of the output alone."""

    def both(function, tensors):
        inputs = [tensors[name].detach().requires_grad_(not forward) for name in INPUTS]
        out = function(*inputs)
        grads = () if forward else torch.autograd.grad(out, inputs, tensors["out"])
        return dict(zip(("out", *INPUTS), (out.detach(), *grads), strict=False))

    return both


def _compiled(package, feature, case, forward):
    torch._dynamo.reset()
    function = torch.compile(_out(package), fullgraph=True, backend="aot_eager")
    tensors, results = _drawn(package, case)[0], _results(forward)
    return _judged(results(function, tensors), results, tensors)


def _packed(package, feature, case, forward):
    if package.packed is None:
        raise Lacks("it takes no packed sequences")
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    tensors = {name: x[0].transpose(0, 1).contiguous() for name, x in _drawn(package, case)[0].items() if name != "lse"}

    def formula(attention):
        def attend(*inputs):
            parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
            return torch.cat([attention(*(x.transpose(0, 1)[None] for x in part))[0].transpose(0, 1) for part in parts])

        return attend

    def got(*inputs):
        return package.packed(*inputs, ends.to(package.device, torch.int32))

    results = _results(forward)
    return _judged(results(got, tensors), results, tensors, formula)


def _cached(package, feature, case, forward):
    if package.cached is None:
        raise Lacks("it has no function for a cache in pages")
    tensors, _ = _drawn(package, case._replace(B=len(LENGTHS), Hkv=1))
    query, key, value = (tensors[name] for name in INPUTS)
    query, lengths = query[:, :, :1], torch.tensor(LENGTHS, dtype=torch.int32, device=package.device)
    with torch.no_grad():
        got = package.cached(query, key, value, lengths)
    results = []
    for b, length in enumerate(LENGTHS):
        one = [query[b : b + 1], key[b : b + 1, :, : length + 1], value[b : b + 1, :, : length + 1]]
        results.append(verdict(got[b : b + 1], reference.eager(*one), reference.attention(*(x.double() for x in one))))
    return next((found.why for found in results if not found.ok), "")


def _by_sample(package, feature, case, forward):
    tensors = {name: x for name, x in _drawn(package, case._replace(B=3))[0].items() if name in (*INPUTS, "out")}

    def results(function, tensors):
        def one(query, key, value):
            return function(query[None], key[None], value[None])[0]

        def loss(query, key, value, out):
            return (one(query, key, value) * out).sum()

        if forward:
            return dict(out=torch.vmap(one)(*(tensors[name] for name in INPUTS)))
        grads = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*tensors.values())
        return dict(zip(INPUTS, grads, strict=True))

    return _judged(results(_out(package), tensors), results, tensors)


def _second(package, feature, case, forward):
    def results(function, tensors):
        inputs = [tensors[name].detach().requires_grad_() for name in INPUTS]
        grads = torch.autograd.grad(function(*inputs), inputs, tensors["out"], create_graph=True)
        return dict(zip(INPUTS, torch.autograd.grad(sum(x.square().sum() for x in grads), inputs), strict=True))

    tensors, _ = _drawn(package, case)
    return _judged(results(_out(package), tensors), results, tensors)


def _tangent(package, feature, case, forward):
    tensors, _ = _drawn(package, case)
    generator = torch.Generator(package.device).manual_seed(1)
    shapes = [tensors[name].shape for name in INPUTS]
    moved = [torch.randn(shape, generator=generator, device=package.device).to(package.dtype) for shape in shapes]

    def results(function, tensors):
        with forward_ad.dual_level():
            pairs = zip((tensors[name] for name in INPUTS), moved, strict=True)
            out = function(*(forward_ad.make_dual(x, tangent.to(x.dtype)) for x, tangent in pairs))
            if (found := forward_ad.unpack_dual(out).tangent) is None:
                raise Lacks("its output has no tangent")
            return dict(out=found.clone())

    return _judged(results(_out(package), tensors), results, tensors)


def _dropout(package, feature, case, forward):
    """A value that is the identity shows which weights were dropped; the rest is the formula of those that were not."""
    tensors, options = _drawn(package, case)
    rate = options["dropout_p"]
    eye = torch.eye(case.Sk, dtype=package.dtype, device=package.device)
    tensors["value"] = eye.expand_as(tensors["value"]).contiguous()
    torch.manual_seed(0)

    def drop(*inputs):
        return package.attend(*inputs, dropout_p=rate, return_lse=False, return_weights=False)[0]

    results = _results(forward)
    got = results(drop, tensors)
    kept = got["out"] != 0
    share = 1 - kept.double().mean().item()
    if not 0.5 * rate < share < 1.5 * rate:
        return f"{share:.2f} of the weights are dropped, not {rate}"

    def formula(attention):
        def attend(query, key, value):
            _, weights = attention(query, key, value, return_weights=True)
            return (weights * kept / (1 - rate)) @ value

        return attend

    return _judged(got, results, tensors, formula)


WAYS = dict(
    call=_call, padding=_padding, lse=_lse, dropout=_dropout, packed=_packed, cached=_cached, compiled=_compiled,
    by_sample=_by_sample, second=_second, tangent=_tangent,
)  # fmt: skip
