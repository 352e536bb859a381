"""Tests the operators of `attention` and their derivatives by torch.library.opcheck."""

import pytest
import torch

from ..inside import fields, leaves_of
from ..sample import one_in, product
from ..sequences import offsets

pytestmark = pytest.mark.filterwarnings("ignore")
OPERATORS = torch.ops.fusedattn

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 3, 5, 8, 4
ROWS, KEYS = (3, 0, 2), (4, 2, 1)


def bools(*shape):
    return torch.rand(shape) < 0.8


def masks():
    return dict(mask=bools(B, 1, SQ, SK), key_mask=bools(B, SK), query_mask=bools(1, SQ))


def noise():
    return dict(dropout_p=0.3, seed=torch.tensor([5]))


def inputs(batch, rows, keys, dtype=torch.float32):
    shapes = (batch, HQ, rows, D), (batch, HKV, keys, D), (batch, HKV, keys, DV)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def dense(dtype=torch.float32, sk=SK, **options):
    return fields(*inputs(B, SQ, sk, dtype), **options)


def starts():
    device = torch.get_default_device()
    return dict(cu_seqlens_q=offsets(ROWS, device), cu_seqlens_k=offsets(KEYS, device))


def packed(**options):
    return fields(*inputs(1, sum(ROWS), sum(KEYS)), **starts(), **options)


def bias_of_rows():
    # The rounding errors in the saved statistics are bytes, which may look like NaN, and NaN is not equal to itself.
    for _ in range(100):
        call = dense(torch.float16, bias=torch.randn(B, 1, SQ, 1))
        if not OPERATORS.forward(*call, False, False, True, "triton")[3].isnan().any():
            return call
    raise AssertionError("there is always a NaN")


def bias_over_batch():
    return dense(bias=torch.randn(1, HQ, SQ, SK), block_mask=torch.ones(1, HQ, 1, 1, dtype=torch.int32))


def given_bias():
    """Return a call with a bias and slopes that need no gradient."""
    call, sinks = leaves_of(inputs(B, SQ, SK, torch.bfloat16)), torch.randn(1, HQ, requires_grad=True)
    return fields(*call, bias=torch.randn(B, 1, SQ, SK), alibi_slopes=torch.rand(1, HQ), sinks=sinks)


LONGEST = dict(max_seqlen_q=3, max_seqlen_k=4)
WINDOW = dict(left=2, right=1, top_left=True)
DRAWS = {  # every option, and every shape of a bias, in a few calls
    "window": lambda: fields(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(B, SQ, SK)), **WINDOW),
    "masks": lambda: dense(torch.float64, right=0, scale=-0.4, **masks()),
    "bias of pairs": lambda: dense(bias=torch.randn(B, HQ, SQ, SK), alibi_slopes=torch.rand(B, HQ), softcap=2.0),
    "keys": lambda: dense(bias=torch.randn(1, HQ, 1, SK), sinks=torch.randn(1, HQ), **noise()),
    "bias of rows": bias_of_rows,
    "bias over batch": bias_over_batch,
    "given bias": given_bias,
    "no keys": lambda: dense(sk=0, sinks=torch.randn(1, HQ)),
    "packed": lambda: packed(right=0, deterministic=True),
    "packed tokens": lambda: packed(key_mask=bools(1, sum(KEYS)), query_mask=bools(1, sum(ROWS)), **LONGEST),
    "packed mask": lambda: packed(
        mask=bools(1, 1, 3, 4), alibi_slopes=torch.rand(3, HQ), **WINDOW, **noise(), **LONGEST
    ),
}
DRAWS["packed bias"] = lambda: DRAWS["packed tokens"]()._replace(
    bias=torch.randn(3, 1, 3, 4), sinks=torch.randn(1, HQ), softcap=2.0
)

INPUTS = (True, True, True, False, False, False)
BIAS_OF_PAIRS = (True, False, False), (False, True, False, True, True, False)
# {name: (name in DRAWS, need_lse, need_weights, save, and for some (incoming gradients, wanted ones))}
CALLS = {
    "window": ("window", True, False, True, ((True, True, False), INPUTS)),
    "nothing saved": ("window", False, False, False),
    "masks": ("masks", True, True, True, ((False, False, True), (True, *[False] * 5))),
    "bias of pairs": ("bias of pairs", True, False, True, BIAS_OF_PAIRS),
    "keys": ("keys", False, True, False, ((True, False, True), (False, False, True, True, False, True))),
    "bias of rows": ("bias of rows", False, False, True),
    "bias over batch": ("bias over batch", False, False, True),
    "no keys": ("no keys", True, False, True),
    "packed": ("packed", True, False, True, ((False, True, False), (True, True, *[False] * 4))),
    "packed bias": ("packed bias", True, True, True, ((True, False, False), (True, True, True, True, False, True))),
    "packed mask": ("packed mask", False, False, False),
}
# Calls that the backend "cpu" takes; weights only if no gradient is wanted.
ON_CPU = {
    "window": ("window", True, False, True, ((True, True, False), INPUTS)),
    "nothing saved": ("window", False, False, False),
    "masks": ("masks", True, False, True, ((False, True, False), (True, False, True, *[False] * 3))),
    "weights": ("masks", True, True, False),
    "given bias": ("given bias", True, False, True, ((True, False, False), (False, True, *[False] * 3, True))),
    "no keys": ("no keys", True, False, True),
    "packed": ("packed", False, False, True, ((True, True, False), INPUTS)),
    "weights of packed": ("packed tokens", True, True, True),
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
    return one_in(11, product(["triton"], names["triton"])) + one_in(5, product(["cpu"], names["cpu"]))


def drawn(backend, name, device):
    with torch.device(device):
        call = DRAWS[TABLES[backend][name][0]]()
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
