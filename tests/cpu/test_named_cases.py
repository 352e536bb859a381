"""Tests each named case, and each pair of options, on a CPU, with and without a named backend."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.cases import CASES, compare
from fusedattn.testing.compare import INPUTS, LEARNED

from .. import cases, sample, sequences
from ..caches import in_float64
from ..cases import Case
from ..close import assert_as_good, assert_case, assert_ok
from ..kernels.test_packed import FEW, PACKINGS, TOGETHER

EITHER = pytest.mark.parametrize("backend", ["cpu", None])
# With so many keys PyTorch's kernel computes the gradients, not our formula.
LONG = [case._replace(Sq=130, Sk=150) for case in cases.SINGLE]
LONG += [
    case._replace(name=f"{case.name} {alike}, {dtype}", dtype=dtype, alike=alike, Sq=300, Sk=280)
    for case in (Case("alike"), Case("alike, causal", causal=True), Case("alike, sinks", sinks=True))
    for dtype in (torch.float16, torch.bfloat16)
    for alike in (0.0, 1.0, 4.0)
]


def taken(case):
    """Return (the part of a case that "cpu" supports, options that get gradients), or None."""
    if case.softcap is not None or case.dropout:
        return None
    return case._replace(grads="out and lse" if "weights" in case.grads else case.grads), ("sinks",)


def run(case, backend, **more):
    """Check a case by a backend; "cpu" must refuse what it does not support."""
    if backend == "cpu" and taken(case) is None:
        with pytest.raises(NotImplementedError, match="'cpu' cannot take .* (dropout|softcap)"):
            assert_case(case, backend=backend, **more)
    else:
        case, learned = taken(case) if backend == "cpu" else (case, LEARNED)
        assert_case(case, learned=learned, backend=backend, **more)


@EITHER
@pytest.mark.parametrize("case", sample.named(cases.SINGLE + cases.SHAPES))
@pytest.mark.one_in(2)
def test_an_option_alone(case, backend, poison):
    run(case, backend)


@pytest.mark.parametrize("case", sample.named(LONG))
@EITHER
@pytest.mark.one_in(3)
def test_an_option_alone_over_more_keys(case, backend):
    run(case, backend)


@EITHER
@pytest.mark.parametrize("case", sample.matrix(*sample.named(cases.PAIRS)))
def test_options_together(case, backend, poison):
    run(case, backend)


@pytest.mark.sample
@pytest.mark.parametrize("case", sample.named(cases.COVERING))
@EITHER
@pytest.mark.one_in(3)
def test_each_pair_of_options_in_a_few_calls(case, backend, poison):
    run(case, backend)


@pytest.mark.parametrize("case", sample.named(x for x in (*cases.SINGLE, *LONG) if taken(x)))
@pytest.mark.one_in(3)
def test_weights(case):
    tensors, options = case.draw()

    def weights(function, tensors, options, **call):
        with torch.no_grad():
            return function(*(tensors[name] for name in INPUTS), **options, return_weights=True, **call)[1]

    got = weights(fa.attention, tensors, options, backend="cpu")
    eager = weights(fa.reference.eager, tensors, options)
    oracle = weights(fa.reference.attention, in_float64(tensors), in_float64(options))
    assert got.dtype == case.dtype
    assert_as_good(got, eager, oracle)


@pytest.mark.parametrize("grads", ["out, lse and weights", "out and weights", "weights"])
@pytest.mark.parametrize("case", sample.named(x for x in (*cases.SINGLE, *LONG) if taken(x)))
@pytest.mark.one_in(6)
def test_gradients_through_the_weights(case, grads, poison):
    assert_case(case._replace(grads=grads), learned=("bias", "sinks"), backend="cpu")


def test_gradients_through_the_weights_of_many_heads():
    """Gradients through the weights are right if scores are computed for a few heads or batches at a time."""
    for shape in ((2, 6, 3, 420), (9, 2, 2, 150)):
        batch, heads, kv_heads, length = shape
        case = Case("large", B=batch, Hq=heads, Hkv=kv_heads, Sq=length, Sk=length, grads="out and weights")
        for options in (dict(causal=True), dict(bias="pairs"), dict(bias="keys"), dict(bias="batch")):
            assert_case(case := case._replace(**options), learned=("bias",), backend="cpu")


def packed(case, number, backend):
    rows, keys = PACKINGS[number % len(PACKINGS)]
    case = case._replace(B=len(rows), Sq=max(rows), Sk=max(keys))
    run(case, backend, function=sequences.packed(fa.attention_varlen, rows, keys), lengths=(rows, keys))


@EITHER
@pytest.mark.parametrize("number", range(len(PACKINGS)))
@pytest.mark.parametrize(
    "options", [{}, dict(causal=True), dict(window=(9, 4)), dict(key_mask="own", sinks=True)], ids=str
)
def test_packed(options, number, backend):
    packed(Case("packed", **options), number, backend)


@pytest.mark.sample
@EITHER
@pytest.mark.parametrize("case", sample.named(FEW))
def test_packed_with_each_pair_of_options_in_a_few_calls(case, backend):
    packed(case, len(case.name), backend)


@EITHER
@pytest.mark.parametrize("case", sample.matrix(*sample.named(TOGETHER)))
def test_packed_with_options_together(case, backend):
    packed(case, TOGETHER.index(case), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", sample.named(CASES))
def test_the_cases_of_check(case, dtype):
    assert_ok(compare(case, None, "cpu", dtype))
