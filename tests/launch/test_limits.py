"""Tests that calls beyond 32-bit indices, or beyond a GPU's shared memory, are refused with a reason."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from triton.runtime.errors import OutOfResources

import fusedattn as fa
from fusedattn.dispatch import backends
from fusedattn.launch import grids

from ..inside import compiled, fields, interpreted
from ..offline import absent
from ..sample import one_in, product

MANY = 70_000  # programs along y or z of a grid are at most 65,535


def huge(*shape):
    return torch.empty(1, dtype=torch.float16).expand(shape)  # memory of one element


def reasons(call, backend="triton"):
    return [x for x in backends.BACKENDS[backend].reasons(call, False) if "2**31" in x]


def call_of(B=1, Hq=1, Sq=16, Sk=16, D=16, **options):
    return fields(huge(B, Hq, Sq, D), huge(B, 1, Sk, D), huge(B, 1, Sk, D), **options)


def packed(sequences, longest=1):
    offsets = torch.zeros(1, dtype=torch.int32).expand(sequences + 1)
    return dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)


SQUARE = dict(Hq=64, Sq=2**16, Sk=2**16)
PER_BATCH, PER_HEAD = torch.ones(1, dtype=torch.bool).expand(64, 1, 2**16, 1), torch.zeros(1, 64, 1, 2**16)
PACKED = dict(Sq=2**15, Sk=2**15, **packed(2**14, 2**15), key_mask=torch.ones(1, 2**15, dtype=torch.bool))
GRID, POSITIONS, BLOCKS = "2**31 programs", "rows and keys", "2**31 blocks"
PAST_A_LIMIT = {  # (refused call, reason, the largest call that is not refused)
    "programs": (dict(B=2**27, Hq=16), GRID, dict(B=2**27 - 1, Hq=16)),
    "sequences": (dict(Hq=16, **packed(2**27 - 1)), GRID, dict(Hq=16, **packed(2**27 - 3))),
    "rows": (dict(Sq=2**31, Sk=1, D=1), POSITIONS, dict(Sq=2**31 - 2048, Sk=1, D=1)),
    "keys": (dict(Sq=1, Sk=2**31, D=1), POSITIONS, dict(Sq=1, Sk=2**31 - 2048, D=1)),
    "rows and keys": (dict(Sq=2**30, Sk=2**30, D=1), POSITIONS, dict(Sq=2**30, Sk=2**30 - 2048, D=1)),
    "blocks": (SQUARE | dict(B=64, mask=PER_BATCH, bias=PER_HEAD), BLOCKS, SQUARE | dict(B=64, mask=PER_BATCH)),
    "blocks of packed": (PACKED, BLOCKS, PACKED | dict(key_mask=None)),
}


@pytest.mark.parametrize("name", PAST_A_LIMIT)
def test_what_passes_32_bits_is_refused(name, device):
    past, why, fits = PAST_A_LIMIT[name]
    assert any(why in reason and "2**31" in reason for reason in reasons(call_of(**past)))
    assert not reasons(call_of(**fits))


@interpreted
def test_a_graph_runs_calls_past_a_limit_on_the_naive_path(monkeypatch, device):
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    monkeypatch.setattr(grids, "MOST_POSITIONS", 32)
    graph = torch.compile(lambda x: fa.attention(x, x, x), fullgraph=True, dynamic=True, backend="eager")
    x = torch.randn(1, 2, 40, 16, device=device)
    assert torch.allclose(graph(x[:, :, :8]), fa.attention(*[x[:, :, :8]] * 3, backend="triton"))
    with pytest.warns(UserWarning, match="rows and keys together exceed"):
        assert torch.equal(graph(x), fa.attention(x, x, x, backend="naive"))


@interpreted
def test_a_wide_window_does_not_pass_32_bits(device):
    query = torch.ones(1, 1, 1, 16, device=device)
    key = query.expand(-1, -1, 2**30 + 64, -1)
    _, lse = fa.attention(query, key, key, window=(5, 2**31 - 1), scale=0.0, return_lse=True, backend="triton")
    assert lse.item() == pytest.approx(math.log(6))


@pytest.fixture
def launched(monkeypatch, tiles):
    """Return (function that simulates a GPU with a limit of shared memory, list of its launches)."""
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    tiles.choose(tuple)
    grids = []

    def gpu(limit=None, itemsize=2):
        def load(kernel):
            names, constants = kernel.src.fn.arg_names, kernel.src.constants
            m, n = (constants.get((names.index(x),), 0) if x in names else 0 for x in ("BLOCK_M", "BLOCK_N"))
            d = constants[(names.index("spec"),)].D if "spec" in names else 0
            # Shared memory for rows once, and for keys and values in each stage.
            needed = (m + 2 * n * kernel.metadata.num_stages) * max(64, d) * itemsize
            if limit is not None and n and needed > limit:
                raise OutOfResources(needed, limit, "shared memory")
            kernel._run = absent.Run(lambda *given: grids.append((kernel.name, given[:3])))
            kernel.function = 0

        return absent.gpu(80, load=load)

    return gpu, grids


def _inputs(*sizes, dtype=torch.float16, D=16):
    B, H, S = sizes
    return [torch.zeros(1, dtype=dtype).expand(B, H, S, D).contiguous().requires_grad_() for _ in range(3)]


@compiled
@pytest.mark.parametrize("two_passes", [False, True], ids=["one pass", "two passes"])
@pytest.mark.one_in(2)
def test_grids_have_one_dimension(two_passes, launched, passes):
    gpu, grids = launched
    passes(1 + two_passes)
    inputs = _inputs(MANY // 4, 4, 1)
    mask = torch.ones(MANY // 4, 1, 1, 1, dtype=torch.bool)
    with gpu():
        out, _, weights = fa.attention(*inputs, mask=mask, return_lse=True, return_weights=True, backend="triton")
        torch.autograd.grad(out.sum() + weights.sum(), inputs)
        fa.attention_decode(*(x.detach() for x in inputs), cache_seqlens=torch.ones(MANY // 4).int(), backend="triton")
        query, key, value = (x.detach().flatten(0, 1) for x in inputs)
        offsets = torch.arange(MANY + 1).int()
        fa.attention_varlen(query, key, value, offsets, offsets, backend="triton")
    names = {name for name, _ in grids}
    assert {"forward", "weights", "preprocess", "dkdv", "decode", "block_mask", "tile_lists", "fill_slots"} <= names
    assert all(y == z == 1 for _, (_, y, z) in grids) and max(x for _, (x, _, _) in grids) >= MANY


KB = 1024
LIMITS = [48 * KB, 64 * KB, 99 * KB, 163 * KB, 227 * KB]
WIDTHS = [(64, torch.float16), (256, torch.float32), (128, torch.float16)]


@compiled
@pytest.mark.parametrize("limit, width", one_in(3, product(LIMITS, WIDTHS)))
def test_a_tile_is_found(limit, width, launched):
    (gpu, grids), (dim, dtype) = launched, width
    inputs = [x.detach() for x in _inputs(1, 2, 40, dtype=dtype, D=dim)]
    with gpu(limit, dtype.itemsize):
        fa.attention(*inputs, backend="triton")
        assert grids and fa.explain(*inputs, backend="triton").backend == "triton"
