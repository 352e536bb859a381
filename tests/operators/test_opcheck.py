"""torch.library.opcheck of every operator with a derivative, and of the derivative."""

import pytest
import torch

from fusedattn.call.options import WHOLE, lengths_of
from fusedattn.operators.namespace import OPERATORS

from ..inside import fields, leaves_of
from ..sample import one_in, product
from ..sequences import offsets

pytestmark = pytest.mark.filterwarnings("ignore")

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 3, 5, 8, 4
ROWS, KEYS = (3, 0, 2), (4, 2, 1)


def dense(device, dtype=torch.float32, sk=SK):
    shapes = (B, HQ, SQ, D), (B, HKV, sk, D), (B, HKV, sk, DV)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def packed(device):
    shapes = (1, HQ, sum(ROWS), D), (1, HKV, sum(KEYS), D), (1, HKV, sum(KEYS), DV)
    return [torch.randn(shape, device=device) for shape in shapes]


def cu_seqlens(device):
    return dict(cu_seqlens_q=offsets(ROWS, device), cu_seqlens_k=offsets(KEYS, device))


# Every option, and every form of a bias, in a few calls.
def _window(device):
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense(device))
    return fields(query, key, value, left=2, right=1, top_left=True)


def _masks(device):
    def bools(*shape):
        return torch.rand(shape, device=device) < 0.8

    masks = dict(mask=bools(B, 1, SQ, SK), key_mask=bools(B, SK), query_mask=bools(1, SQ))
    return fields(*dense(device, torch.float64), right=0, scale=-0.4, **masks)


def _bias_of_pairs(device):
    bias, slopes = torch.randn(B, HQ, SQ, SK, device=device), torch.rand(B, HQ, device=device)
    return fields(*dense(device), bias=bias, alibi_slopes=slopes, softcap=2.0, deterministic=True)


def _bias_of_keys(device):
    bias, sinks = torch.randn(1, HQ, 1, SK, device=device), torch.randn(1, HQ, device=device)
    return fields(*dense(device), bias=bias, sinks=sinks, dropout_p=0.3, seed=torch.tensor([5], device=device))


def _bias_of_rows(device):
    # What rounding takes of the output lies in `stats` as bytes, which may be a NaN, and that equals nothing.
    for _ in range(100):
        call = fields(*dense(device, torch.float16), bias=torch.randn(B, 1, SQ, 1, device=device))
        if not OPERATORS.forward(*call, False, False, True, "triton")[3].isnan().any():
            return call
    raise AssertionError("there is always a NaN")


def _bias_over_batch(device):
    bias = torch.randn(1, HQ, SQ, SK, device=device)
    block_mask = OPERATORS.block_mask(None, None, None, bias, *WHOLE)
    return fields(*dense(device), bias=bias, block_mask=block_mask)


def _no_keys(device):
    return fields(*dense(device, sk=0), sinks=torch.randn(1, HQ, device=device))


def _packed(device):
    return fields(*packed(device), right=0, **cu_seqlens(device))


def _packed_bias(device):
    tokens = dict(key_mask=torch.rand(1, sum(KEYS), device=device) < 0.8)
    tokens |= dict(query_mask=torch.rand(1, sum(ROWS), device=device) < 0.8)
    learned = dict(bias=torch.randn(3, 1, 3, 4, device=device), sinks=torch.randn(1, HQ, device=device))
    return fields(
        *packed(device), **tokens, **learned, softcap=2.0, max_seqlen_q=3, max_seqlen_k=4, **cu_seqlens(device)
    )


def _packed_tokens(device):
    tokens = dict(key_mask=torch.rand(1, sum(KEYS), device=device) < 0.8)
    tokens |= dict(query_mask=torch.rand(1, sum(ROWS), device=device) < 0.8)
    return fields(*packed(device), **tokens, max_seqlen_q=3, max_seqlen_k=4, **cu_seqlens(device))


def _packed_mask(device):
    mask, slopes = torch.rand(1, 1, 3, 4, device=device) < 0.8, torch.rand(3, HQ, device=device)
    noise = dict(dropout_p=0.3, seed=torch.tensor([5], device=device))
    longest = dict(max_seqlen_q=3, max_seqlen_k=4, **cu_seqlens(device))
    return fields(*packed(device), mask=mask, alibi_slopes=slopes, left=2, top_left=True, **noise, **longest)


# of each: what it is, whether lse, weights and what the backward needs are asked for
CALLS = {
    "window": (_window, True, False, True),
    "nothing saved": (_window, False, False, False),
    "masks": (_masks, True, True, True),
    "bias of pairs": (_bias_of_pairs, True, False, True),
    "bias of keys": (_bias_of_keys, False, True, False),
    "bias of rows": (_bias_of_rows, False, False, True),
    "bias over batch": (_bias_over_batch, False, False, True),
    "no keys": (_no_keys, True, False, True),
    "packed": (_packed, True, False, True),
    "packed bias": (_packed_bias, True, True, True),
    "packed mask": (_packed_mask, False, False, False),
}
# of some of them: which gradients come in, and which of query, key, value, bias, slopes and sinks are wanted
DERIVATIVES = {
    "window": ((True, True, False), (True, True, True, False, False, False)),
    "masks": ((False, False, True), (True, False, False, False, False, False)),
    "bias of pairs": ((True, False, False), (False, True, False, True, True, False)),
    "bias of keys": ((True, False, True), (False, False, True, True, False, True)),
    "packed": ((False, True, False), (True, True, False, False, False, False)),
    "packed bias": ((True, False, False), (True, True, True, True, False, True)),
}


CHECKS = "test_schema", "test_autograd_registration", "test_faketensor"
# What is traced with sizes that are not known costs five times as much: of the second derivatives one will do.
SYMBOLIC = {"forward": ("window", "masks", "bias of keys", "packed bias"), "backward": ("window",)}


def opcheck(operator, arguments, symbolic):
    checks = *CHECKS, f"test_aot_dispatch_{'dynamic' if symbolic else 'static'}"
    torch.library.opcheck(getattr(OPERATORS, operator).default, arguments, test_utils=checks)


def _given_bias(device):
    """No gradients of it, nor of slopes."""
    bias, slopes = torch.randn(B, 1, SQ, SK, device=device), torch.rand(1, HQ, device=device)
    inputs, sinks = leaves_of(dense(device, torch.bfloat16)), torch.randn(1, HQ, device=device, requires_grad=True)
    return fields(*inputs, bias=bias, alibi_slopes=slopes, sinks=sinks)


def _leaves(draw):
    return lambda device: leaves_of(draw(device))


# As in CALLS and DERIVATIVES, of what the backend "cpu" takes; weights of what wants no gradients.
ON_CPU = {
    "window": (_leaves(_window), True, False, True),
    "nothing saved": (_leaves(_window), False, False, False),
    "masks": (_leaves(_masks), True, False, True),
    "weights": (_masks, True, True, False),
    "a bias that is given": (_given_bias, True, False, True),
    "no keys": (_leaves(_no_keys), True, False, True),
    "packed": (_leaves(_packed), False, False, True),
    "weights of packed": (_packed_tokens, True, True, True),
}
DERIVATIVES_ON_CPU = {
    "window": ((True, True, False), (True, True, True, False, False, False)),
    "masks": ((False, True, False), (True, False, True, False, False, False)),
    "a bias that is given": ((True, False, False), (False, True, False, False, False, True)),
    "packed": ((True, True, False), (True, True, True, False, False, False)),
}


@pytest.mark.parametrize("name", one_in(3, product(CALLS)))
@pytest.mark.one_in(2)
def test_forward_and_its_derivative(name, device):
    draw, *needed = CALLS[name]
    opcheck("forward", (*leaves_of(draw(device)), *needed, "triton"), name in SYMBOLIC["forward"])


@pytest.mark.parametrize("name", one_in(2, product(ON_CPU)))
def test_forward_and_its_derivative_on_a_cpu(name):
    draw, *needed = ON_CPU[name]
    opcheck("forward", (*draw("cpu"), *needed, "cpu"), name in ("window", "a bias that is given"))


def check_backward(call, backend, came, need, symbolic):
    with torch.no_grad():
        out, lse, weights, stats = OPERATORS.forward(*call, True, came[2], True, backend)
    results = zip((out, lse, weights), came, strict=True)
    incoming = leaves_of(torch.randn_like(x) if comes else None for x, comes in results)
    opcheck("backward", (*incoming, out, weights, stats, *call, backend, list(need)), symbolic)


@pytest.mark.parametrize("name", one_in(3, product(DERIVATIVES)))
@pytest.mark.one_in(2)
def test_backward_and_its_derivative(name, device):
    call = leaves_of(CALLS[name][0](device))
    check_backward(call, "triton", *DERIVATIVES[name], name in SYMBOLIC["backward"])


@pytest.mark.parametrize("name", one_in(2, product(DERIVATIVES_ON_CPU)))
@pytest.mark.one_in(2)
def test_backward_and_its_derivative_on_a_cpu(name):
    check_backward(ON_CPU[name][0]("cpu"), "cpu", *DERIVATIVES_ON_CPU[name], name == "window")


def test_mark(device):
    masks, bias = _masks(device), _bias_of_keys(device).bias.requires_grad_()
    given = masks.mask, masks.key_mask, masks.query_mask, bias
    torch.library.opcheck(OPERATORS.block_mask.default, (*given, *WHOLE))
    call = _packed_bias(device)
    torch.library.opcheck(
        OPERATORS.block_mask.default, (None, call.key_mask, call.query_mask, bias[..., :4], *lengths_of(call))
    )
