"""Tests the tangents of output, lse and weights in forward mode, for each option and backend, and their memory."""

import functools
import pathlib

import pytest
import torch
from torch.autograd import forward_ad

import fusedattn as fa
from fusedattn import reference
from fusedattn.testing.compare import LEARNED

from .. import cases
from ..cases import Case
from ..close import assert_like, assert_ok
from ..conftest import run_python
from ..inside import OPTIONS, by
from ..kernels.test_packed import PACKED_FEW, PACKED_TOGETHER, draw as draw_packed
from ..sample import matrix, named
from ..sequences import attention_varlen, by_sequence, offsets
from ..tangents import compare, directions, with_tangents

# All options that can have a tangent. Tests give a tangent to one input at a time.
EVERYTHING = Case("", B=2, Hq=4, Hkv=2, bias="heads", alibi="own", sinks=True, softcap=2.0, causal=True, key_mask="own")
ONE = ("query", 0.3), ("key", 0.0), ("value", 0.3), ("value", 0.0), ("bias", 0.3), ("alibi_slopes", 0.0), ("sinks", 0.3)


def _on(device, case):
    return case._replace(dtype=torch.float16) if (case.dtype, device) == (torch.float64, "cuda") else case


def _hold(case, backend, names=None, weights=True, device="cpu"):
    tensors, options = _on(device, case).draw(device)
    moved = directions(tensors, options, names)
    got = with_tangents(functools.partial(fa.attention, backend=backend), tensors, options, moved, weights)
    assert_ok(compare(got, tensors, options, moved))


# COVERING has each pair of options, so each option alone has one of its two dtypes here.
ALONE = [case for number, case in enumerate(cases.SINGLE) if number % 4 in (0, 3)]
CASES = [*named(cases.COVERING), *matrix(*named([*cases.SHAPES, *ALONE, *cases.WIDE[::5]]))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(16)
def test_tangents_by_kernels(case, device):
    _hold(case, "triton", device=device)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "case", [*named(cases.COVERING), *matrix(*named([*cases.SHAPES, *cases.SINGLE, *cases.OPTION_PAIRS]))]
)
def test_tangents_on_a_cpu(case, weights):
    _hold(case, None, weights=weights)


@pytest.mark.parametrize("backend", ["triton", "naive"])
@pytest.mark.parametrize("name, dropout", ONE)
@pytest.mark.one_in(7)
def test_tangents_of_one_input(name, dropout, backend, device):
    _hold(EVERYTHING._replace(name=name, dropout=dropout), backend, [name], device=device)


def _hold_packed(case, number, device, backend):
    rows, keys, tensors, options = draw_packed(case, number, device)
    moved = directions(tensors, options)
    got = with_tangents(attention_varlen(rows, keys, backend), tensors, options, moved)
    assert_ok(compare(got, tensors, options, moved, lambda function: by_sequence(function, rows, keys)))


@pytest.mark.parametrize(("number", "case"), PACKED_FEW + matrix(*PACKED_TOGETHER[::18]))
@pytest.mark.one_in(12)
def test_tangents_of_packed_sequences(number, case, device):
    _hold_packed(_on(device, case), number, device, "triton")


@pytest.mark.parametrize(("number", "case"), PACKED_FEW + matrix(*PACKED_TOGETHER[::18]))
def test_tangents_of_packed_sequences_on_a_cpu(number, case):
    _hold_packed(case, number + 1, "cpu", None)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["triton", "naive", None])
def test_a_bias_of_minus_infinity_may_have_any_tangent(backend, dropout, device):
    """Results do not depend on the tangent of a bias of -inf, which may be inf: log(0) has the tangent 1 / 0."""
    query, key, value = torch.randn(3, 1, 2, 40, 16, device=device)
    gate = torch.rand(40, device=device).masked_fill(torch.arange(40, device=device) % 3 == 0, 0.0)

    def attend(gate, bias, backend=backend):
        shut = bias(gate).expand(40, 40).contiguous()
        options = dict(dropout_p=dropout, seed=3) if dropout else {}
        return by(backend)(query, key, value, bias=shut, return_weights=True, **options)

    def with_a_finite_one(gate):
        finite = torch.where(gate > 0, 1 / gate, 0.0)
        return torch.func.jvp(lambda x: attend(x, lambda x: x, "eager"), (gate.log(),), (finite,))[1]

    got = torch.func.jvp(lambda x: attend(x, torch.log), (gate,), (torch.ones_like(gate),))[1]
    assert_like(got, with_a_finite_one, gate)


@pytest.mark.parametrize("backend", ["triton", "naive"])
def test_a_hidden_key_may_be_huge(backend, device):
    """A hidden key may be so large that its score is infinite: its weight is 0, and the tangent is right."""
    query, key, value = torch.randn(3, 1, 1, 20, 16, device=device)
    key[..., -1, :] = 3e38
    mask = torch.arange(20, device=device).expand(20, 20) < 19
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query.requires_grad_(), torch.ones_like(query))
        got = forward_ad.unpack_dual(fa.attention(dual, key, value, mask=mask, backend=backend)).tangent

    def of_few(query, key, value):
        attend = lambda x: fa.reference.eager(x, key, value)  # noqa: E731
        return torch.func.jvp(attend, (query,), (torch.ones_like(query),))[1]

    assert_like(got, of_few, query.detach(), key[..., :-1, :], value[..., :-1, :])


@pytest.mark.parametrize("backend, options", [("cpu", {}), ("naive", dict(sinks=torch.zeros(1), return_weights=True))])
def test_a_row_whose_results_are_parts_of_more(backend, options):
    """A tangent has the layout that torch wants, even if the output is one row of a wider tensor."""
    query, key, value = torch.randn(1, 64), torch.randn(3, 64), torch.randn(3, 32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        found = fa.attention(dual, key, value, backend=backend, **options)
        out = found[0] if options else found
        got = forward_ad.unpack_dual(out).tangent

    def of_eager(query):
        attend = lambda x: fa.reference.eager(x, key, value, sinks=options.get("sinks"))  # noqa: E731
        return torch.func.jvp(attend, (query,), (torch.ones_like(query),))[1]

    assert_like(got, of_eager, query)


PACKED = {"packed": {}, "packed causal": dict(causal=True), "packed sinks": dict(sinks=torch.randn(2).requires_grad_())}


@pytest.mark.parametrize("backend", ["naive", None], ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, *PACKED])
def test_gradients_of_a_tangent_while_its_level_is_open(name, backend):
    packed = name in PACKED
    options = PACKED[name] if packed else OPTIONS[name](4, 5, "cpu")
    options = options | dict(return_lse=True, return_weights=not packed)
    given = {each: options.pop(each).detach().double() for each in LEARNED if each in options}
    shapes = [(4, 2, 6), (5, 2, 6), (5, 2, 6)] if packed else [(2, 2, 4, 6), (2, 2, 5, 6), (2, 2, 5, 6)]
    inputs = [*(torch.randn(shape, dtype=torch.float64) for shape in shapes), *given.values()]
    inputs = [x.requires_grad_() for x in inputs]
    moved = tuple(torch.randn_like(x) for x in inputs)
    lengths = (offsets([1, 3]), offsets([3, 2])) if packed else ()

    def attend(*x, module=reference, **more):
        function = module.attention_varlen if packed else module.attention
        return function(*x[:3], *lengths, **options, **dict(zip(given, x[3:], strict=True)), **more)

    def loss(*x):
        return sum(each.sin().sum() for each in torch.func.jvp(attend, x, moved)[1] if each is not None)

    want = torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*(x.detach() for x in inputs))
    with forward_ad.dual_level():
        dual = (forward_ad.make_dual(x, t) for x, t in zip(inputs, moved, strict=True))
        results = attend(*dual, module=fa, backend=backend)
        tangents = [forward_ad.unpack_dual(x).tangent for x in results]
        got = torch.autograd.grad(sum(x.sin().sum() for x in tangents), inputs)
        got = [forward_ad.unpack_dual(x).primal for x in got]
    assert_like(got, want)


LONG, WIDTH = 16384, 64
# Prints the peak memory that a step of one head adds, output and tangent included.
STEP = f"""
import re
import torch
import fusedattn as fa

def peak():
    return 2**10 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
for length in (64, {LONG // 2}, {LONG}):  # the first call loads libraries
    inputs, directions = torch.randn(2, 3, 1, 1, length, {WIDTH}).unbind()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    with torch.no_grad():
        results = torch.func.jvp(fa.attention, (*inputs,), (*directions,))
    print(peak() - before)
    del results
"""


@pytest.mark.matrix
@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux forgets a peak")
def test_on_a_cpu_it_grows_as_the_sequence_does():
    _, half, whole = map(int, run_python("-c", STEP).split())
    given = 6 * LONG * WIDTH * 4  # bytes of query, key, value and their tangents
    assert whole <= 5 * given, f"{whole / given:.2f} times its inputs; all scores would be {LONG**2 * 4 / given:.0f}"
    assert whole <= 2.2 * half, f"{whole / half:.2f} times that of half the sequence"
