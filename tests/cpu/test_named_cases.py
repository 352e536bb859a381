"""Every named case and every pair of options by the backend "cpu", and by what a CPU takes when no backend is named."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.cases import CASES, compare
from fusedattn.testing.compare import LEARNED, with_gradients

from .. import cases, sample
from ..cases import Case
from ..close import assert_close
from ..kernels.test_packed import FEW, PACKINGS, TOGETHER
from ..sequences import attention_varlen, by_sequence

# Rectangles of many keys take PyTorch's kernel in the backward as well; those of few are computed by the formula.
LONG = [
    Case("plain")._replace(name=f"{name}, {dtype}", dtype=dtype, Sq=130, Sk=150, **options)
    for number, (name, options) in enumerate({"plain": {}, **cases.FEATURES}.items())
    for dtype in (torch.float32, cases.DTYPES[1 + number % 3])
    if not {"Sq", "Sk"} & set(options)
]
LONG += [
    case._replace(name=f"{case.name}, {dtype}", dtype=dtype, Sq=300, Sk=280, alike=alike, D=16, Dv=16)
    for case in (Case("alike"), Case("alike, causal", causal=True), Case("alike, sinks", sinks=True))
    for dtype, alike in ((torch.float32, 4.0), (torch.float16, 4.0), (torch.bfloat16, 4.0), (torch.bfloat16, 0.0))
]


def taken(case):
    """A case as far as "cpu" takes it: (case, names of what is learned), or None."""
    if case.softcap is not None or case.dropout:
        return None
    return case._replace(grads="out and lse" if "weights" in case.grads else case.grads), ("sinks",)


def run(case, backend):
    learned = LEARNED
    if backend == "cpu":
        if taken(case) is None:
            with pytest.raises(NotImplementedError, match="'cpu' cannot take this call: it knows no (dropout|softcap)"):
                with_gradients(fa.attention, *case.draw(), case.grads, backend=backend)
            return
        case, learned = taken(case)
    tensors, options = case.draw()
    got = with_gradients(fa.attention, tensors, options, case.grads, learned, backend=backend)
    assert_close(got, tensors, options, case.grads)


@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("case", cases.SINGLE + cases.SHAPES, ids=lambda case: case.name)
def test_an_option_alone(case, backend, poison):
    run(case, backend)


@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_an_option_alone_over_more_keys(case, backend):
    run(case, backend)


@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("case", sample.matrix(*sample.named(cases.PAIRS)))
def test_options_together(case, backend, poison):
    run(case, backend)


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("case", cases.COVERING, ids=lambda case: case.name)
def test_each_pair_of_options_in_a_few_calls(case, backend, poison):
    run(case, backend)


@pytest.mark.parametrize("case", [*cases.SINGLE, *LONG], ids=lambda case: case.name)
def test_weights(case):
    if taken(case) is None:
        return
    tensors, options = case.draw()
    names = "query", "key", "value"

    def weights(function, tensors, options, **call):
        with torch.no_grad():
            return function(*(tensors[name] for name in names), **options, return_weights=True, **call)[1]

    got = weights(fa.attention, tensors, options, backend="cpu")
    exact = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in options.items()}
    oracle = weights(fa.reference.attention, {name: x.double() for name, x in tensors.items()}, exact)
    assert got.dtype == case.dtype and torch.equal(got == 0, oracle.to(case.dtype) == 0)
    torch.testing.assert_close(got.double(), oracle, rtol=4 * torch.finfo(case.dtype).eps, atol=4e-6 if case.dtype != torch.float64 else 1e-14)


def packed(case, number, backend):
    rows, keys = PACKINGS[number % len(PACKINGS)]
    case = case._replace(B=len(rows), Sq=max(rows), Sk=max(keys))
    learned = LEARNED
    if backend == "cpu":
        case, learned = taken(case) or (None, None)
        if case is None:
            return
    tensors, options = case.draw()
    got = with_gradients(attention_varlen(rows, keys, backend), tensors, options, case.grads, learned)
    of = dict(apply=lambda function: by_sequence(function, rows, keys), lengths=(rows, keys))
    assert_close(got, tensors, options, case.grads, **of)


@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("number", range(len(PACKINGS)))
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(9, 4)), dict(key_mask="own", sinks=True)], ids=str)
def test_packed(options, number, backend):
    packed(Case("packed", **options), number, backend)


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_packed_with_each_pair_of_options_in_a_few_calls(case, backend):
    packed(case, len(case.name), backend)


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["cpu", None])
@pytest.mark.parametrize(("number", "case"), enumerate(TOGETHER), ids=str)
def test_packed_with_options_together(number, case, backend):
    packed(case, number, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_of_check(case, dtype):
    wrong = {name: found.why for name, found in compare(case, None, "cpu", dtype).items() if not found.ok}
    assert not wrong, wrong
