"""Tests each operator and its derivative by torch.library.opcheck."""

import pytest
import torch

from ..inside import WHOLE, fields, leaves_of
from ..sample import one_in, product
from ..sequences import offsets

pytestmark = pytest.mark.filterwarnings("ignore")
OPERATORS = torch.ops.fusedattn

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


def random_tensors(device):
    return (lambda *shape: torch.randn(shape, device=device)), (lambda *shape: torch.rand(shape, device=device) < 0.8)


# every option, and every shape of a bias, in a few calls
def _window(device):
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense(device))
    return fields(query, key, value, left=2, right=1, top_left=True)


def _masks(device):
    _, bools = random_tensors(device)
    masks = dict(mask=bools(B, 1, SQ, SK), key_mask=bools(B, SK), query_mask=bools(1, SQ))
    return fields(*dense(device, torch.float64), right=0, scale=-0.4, **masks)


def _bias_of_pairs(device):
    draw, _ = random_tensors(device)
    learned = dict(bias=draw(B, HQ, SQ, SK), alibi_slopes=draw(B, HQ).abs())
    return fields(*dense(device), **learned, softcap=2.0, deterministic=True)


def _bias_of_keys(device):
    draw, _ = random_tensors(device)
    noise = dict(dropout_p=0.3, seed=torch.tensor([5], device=device))
    return fields(*dense(device), bias=draw(1, HQ, 1, SK), sinks=draw(1, HQ), **noise)


def _bias_of_rows(device):
    # The rounding errors in the saved statistics are bytes, which may look like NaN, and NaN is not equal to itself.
    for _ in range(100):
        call = fields(*dense(device, torch.float16), bias=random_tensors(device)[0](B, 1, SQ, 1))
        if not OPERATORS.forward(*call, False, False, True, "triton")[3].isnan().any():
            return call
    raise AssertionError("there is always a NaN")


def _bias_over_batch(device):
    bias = random_tensors(device)[0](1, HQ, SQ, SK)
    return fields(*dense(device), bias=bias, block_mask=OPERATORS.block_mask(None, None, None, bias, **WHOLE)[0])


def _no_keys(device):
    return fields(*dense(device, sk=0), sinks=random_tensors(device)[0](1, HQ))


def _given_bias(device):
    """Return a call with a bias and slopes that need no gradient."""
    draw, _ = random_tensors(device)
    inputs, sinks = leaves_of(dense(device, torch.bfloat16)), draw(1, HQ).requires_grad_()
    return fields(*inputs, bias=draw(B, 1, SQ, SK), alibi_slopes=draw(1, HQ).abs(), sinks=sinks)


def _packed(device):
    return fields(*packed(device), right=0, **cu_seqlens(device))


def _packed_tokens(device):
    _, bools = random_tensors(device)
    tokens = dict(key_mask=bools(1, sum(KEYS)), query_mask=bools(1, sum(ROWS)))
    return fields(*packed(device), **tokens, max_seqlen_q=3, max_seqlen_k=4, **cu_seqlens(device))


def _packed_bias(device):
    draw, _ = random_tensors(device)
    return _packed_tokens(device)._replace(bias=draw(3, 1, 3, 4), sinks=draw(1, HQ), softcap=2.0)


def _packed_mask(device):
    draw, bools = random_tensors(device)
    noise = dict(dropout_p=0.3, seed=torch.tensor([5], device=device))
    longest = dict(max_seqlen_q=3, max_seqlen_k=4, **cu_seqlens(device))
    options = dict(mask=bools(1, 1, 3, 4), alibi_slopes=draw(3, HQ).abs(), left=2, top_left=True)
    return fields(*packed(device), **options, **noise, **longest)


INPUTS = (True, True, True, False, False, False)
BIAS_OF_PAIRS = (True, False, False), (False, True, False, True, True, False)
# {name: (call, need_lse, need_weights, save, and for some (incoming gradients, wanted ones))}
CALLS = {
    "window": (_window, True, False, True, ((True, True, False), INPUTS)),
    "nothing saved": (_window, False, False, False),
    "masks": (_masks, True, True, True, ((False, False, True), (True, *[False] * 5))),
    "bias of pairs": (_bias_of_pairs, True, False, True, BIAS_OF_PAIRS),
    "keys": (_bias_of_keys, False, True, False, ((True, False, True), (False, False, True, True, False, True))),
    "bias of rows": (_bias_of_rows, False, False, True),
    "bias over batch": (_bias_over_batch, False, False, True),
    "no keys": (_no_keys, True, False, True),
    "packed": (_packed, True, False, True, ((False, True, False), (True, True, *[False] * 4))),
    "packed bias": (_packed_bias, True, True, True, ((True, False, False), (True, True, True, True, False, True))),
    "packed mask": (_packed_mask, False, False, False),
}
# Calls that the backend "cpu" takes; weights only if no gradient is wanted.
ON_CPU = {
    "window": (_window, True, False, True, ((True, True, False), INPUTS)),
    "nothing saved": (_window, False, False, False),
    "masks": (_masks, True, False, True, ((False, True, False), (True, False, True, *[False] * 3))),
    "weights": (_masks, True, True, False),
    "given bias": (_given_bias, True, False, True, ((True, False, False), (False, True, *[False] * 3, True))),
    "no keys": (_no_keys, True, False, True),
    "packed": (_packed, False, False, True, ((True, True, False), INPUTS)),
    "weights of packed": (_packed_tokens, True, True, True),
}
CHECKS = "test_schema", "test_autograd_registration", "test_faketensor"
TABLES = dict(triton=CALLS, cpu=ON_CPU)
# Tracing with unknown sizes costs five times as much: one second derivative is enough.
SYMBOLIC = dict(triton=("window", "masks", "keys", "packed bias"), cpu=("window",))


def opcheck(operator, arguments, symbolic):
    checks = *CHECKS, f"test_aot_dispatch_{'dynamic' if symbolic else 'static'}"
    torch.library.opcheck(getattr(OPERATORS, operator).default, arguments, test_utils=checks)


def each(some=lambda call: True):
    """Return test parameters (backend, name) of some calls, of which `make test` runs fewer by kernels."""
    names = {backend: [name for name, call in calls.items() if some(call)] for backend, calls in TABLES.items()}
    return one_in(6, product(["triton"], names["triton"])) + one_in(2, product(["cpu"], names["cpu"]))


def drawn(backend, name, device):
    if backend == "cpu" != device:
        pytest.skip("about CPU tensors")
    call = TABLES[backend][name][0](device)
    return call if name in ("weights", "given bias", "weights of packed") else leaves_of(call)


@pytest.mark.parametrize("backend, name", each())
def test_forward_and_its_derivative(backend, name, device):
    _, *needed = TABLES[backend][name][:4]
    opcheck("forward", (*drawn(backend, name, device), *needed, backend), name in SYMBOLIC[backend])


@pytest.mark.parametrize("backend, name", each(lambda call: len(call) > 4))
def test_backward_and_its_derivative(backend, name, device):
    call, (incoming, need) = drawn(backend, name, device), TABLES[backend][name][4]
    with torch.no_grad():
        out, lse, weights, stats = OPERATORS.forward(*call, True, incoming[2], True, backend)
    results = zip((out, lse, weights), incoming, strict=True)
    incoming = leaves_of(torch.randn_like(x) if comes else None for x, comes in results)
    symbolic = (backend, name) == ("triton", "masks")
    opcheck("backward", (*incoming, out, weights, stats, *call, backend, list(need)), symbolic)


def test_block_masks(device):
    masks, bias = _masks(device), _bias_of_keys(device).bias.requires_grad_()
    torch.library.opcheck(OPERATORS.block_mask.default, (masks.mask, masks.key_mask, masks.query_mask, bias), WHOLE)
    call = _packed_bias(device)
    lengths = dict(cu_seqlens(device), rows=sum(ROWS), keys=sum(KEYS), max_seqlen_q=3, max_seqlen_k=4)
    masks = None, call.key_mask, call.query_mask, bias[..., :4]
    torch.library.opcheck(OPERATORS.block_mask.default, masks, lengths)
