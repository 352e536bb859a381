"""Calls past what a GPU or 32 bits hold are refused with a reason; grids have one dimension; any shared memory."""

import re
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

import fusedattn as fa
from fusedattn.dispatch import backends
from fusedattn.launch import failures, tile_table as table

from ..inside import compiled, fields, only_interpreted, passes_compiled
from ..offline import absent
from ..sample import one_in, product

TABLE = Path(__file__).parents[2] / "bench" / "results" / "kernels.md"
MANY = 70_000  # programs along y or z of a grid are at most 65,535


@only_interpreted
def test_this_file_without_the_interpreter():
    passes_compiled(__file__)


def huge(*shape):
    """A tensor of so many elements that takes the memory of one."""
    return torch.empty(1, dtype=torch.float16).expand(shape)


def reasons(call, backend="triton"):
    return [x for x in backends.BACKENDS[backend].reasons(call, False) if "2**31" in x]


def call_of(B=1, Hq=1, Sq=16, Sk=16, D=16, **options):
    return fields(huge(B, Hq, Sq, D), huge(B, 1, Sk, D), huge(B, 1, Sk, D), **options)


def test_as_many_programs_as_a_grid_has_and_one_more(device):
    assert not reasons(call_of(B=2**27 - 1, Hq=16))
    for backend in ("triton", "hopper"):
        assert reasons(call_of(B=2**27, Hq=16), backend) == ["the grid would pass 2**31 programs"]
    with pytest.raises(
        NotImplementedError, match="'triton' cannot take this call: .*the grid would pass 2\\*\\*31 programs"
    ):
        fa.attention(huge(2**27, 16, 16, 8), huge(2**27, 1, 16, 8), huge(2**27, 1, 16, 8), backend="triton")


def test_sequences_begin_with_a_block_of_their_own(device):
    offsets = torch.zeros(1, dtype=torch.int32).expand(2**27)
    packed = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=1, max_seqlen_k=1)
    assert reasons(call_of(Hq=16, **packed)) == ["the grid would pass 2**31 programs"]
    packed |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets[: 2**27 - 2])
    assert not reasons(call_of(Hq=16, **packed))


@pytest.mark.parametrize("sizes", [(1, 2**31), (2**31, 1), (2**30, 2**30)], ids=str)
def test_positions_are_of_32_bits(sizes, device):
    rows, keys = sizes
    assert "rows and keys together would pass 2**31" in reasons(call_of(Sq=rows, Sk=keys, D=1))
    fewer = max(rows, keys) - 2048
    assert not reasons(call_of(Sq=min(rows, fewer), Sk=min(keys, fewer), D=1))


def test_a_block_mask_is_launched_block_by_block(device):
    sizes = dict(B=64, Hq=64, Sq=2**16, Sk=2**16)
    rows, keys = torch.ones(64, 1, 2**16, 1, dtype=torch.bool), torch.zeros(1, 64, 1, 2**16)
    assert reasons(call_of(**sizes, mask=rows, bias=keys)) == ["its block mask would pass 2**31 blocks"]
    assert not reasons(call_of(**sizes, mask=rows)) and not reasons(call_of(**sizes, bias=keys[:, :1]))
    assert not reasons(call_of(**sizes | dict(B=8), mask=rows[:8], bias=keys))
    lengths = torch.zeros(1, dtype=torch.int32).expand(2**14 + 1)
    packed = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=2**15, max_seqlen_k=2**15)
    own = torch.ones(1, 2**15, dtype=torch.bool)
    assert reasons(call_of(Sq=2**15, Sk=2**15, **packed, key_mask=own)) == ["its block mask would pass 2**31 blocks"]


@pytest.fixture
def launched(monkeypatch):
    """launched(limit): a GPU that is not there; what is launched, and how much shared memory its tiles were given.

    A tile takes what its copies take: of rows once, of keys and values in each stage.
    """
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    monkeypatch.setattr(table, "fitting", {})
    failures.forget()
    compile_one, grids = JITFunction._do_compile, []

    def gpu(limit=None, itemsize=2):
        def load(kernel):
            names, constants = kernel.src.fn.arg_names, kernel.src.constants
            m, n = (constants.get((names.index(x),), 0) if x in names else 0 for x in ("BLOCK_M", "BLOCK_N"))
            d = constants[(names.index("spec"),)].D if "spec" in names else 0
            needed = (m + 2 * n * kernel.metadata.num_stages) * max(64, d) * itemsize
            if limit is not None and n and needed > limit:
                raise OutOfResources(needed, limit, "shared memory")
            kernel._run = absent.Run(lambda *given: grids.append((kernel.name, given[:3])))
            kernel.function = 0

        return absent.gpu(80, load=load)

    assert compile_one is JITFunction._do_compile
    return gpu, grids


def _inputs(*sizes, dtype=torch.float16, D=16):
    B, H, S = sizes
    return [torch.zeros(1, dtype=dtype).expand(B, H, S, D).contiguous().requires_grad_() for _ in range(3)]


@compiled
@pytest.mark.parametrize("two_passes", [False, True], ids=["one pass", "two passes"])
def test_grids_have_one_dimension(two_passes, launched, monkeypatch):
    gpu, grids = launched
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: two_passes)
    inputs = _inputs(MANY // 4, 4, 1)
    mask = torch.ones(MANY // 4, 1, 1, 1, dtype=torch.bool)
    with gpu():
        out, _, weights = fa.attention(*inputs, mask=mask, return_lse=True, return_weights=True, backend="triton")
        torch.autograd.grad(out.sum() + weights.sum(), inputs)
        fa.attention_decode(*(x.detach() for x in inputs), cache_seqlens=torch.ones(MANY // 4).int(), backend="triton")
        query, key, value = (x.detach().flatten(0, 1) for x in inputs)
        offsets = torch.arange(MANY + 1).int()
        fa.attention_varlen(query, key, value, offsets, offsets, backend="triton")
    assert {"forward", "weights", "preprocess", "dkdv", "decode", "block_mask", "tile_lists", "fill_slots"} <= {
        name for name, _ in grids
    }
    assert all(y == z == 1 for _, (_, y, z) in grids) and max(x for _, (x, _, _) in grids) >= MANY


KB = 1024
LIMITS = [48 * KB, 64 * KB, 99 * KB, 163 * KB, 227 * KB]


WIDTHS = [(64, torch.float16), (256, torch.float32), (128, torch.float16)]


@compiled
@pytest.mark.parametrize("limit, width", one_in(3, product(LIMITS, WIDTHS)))
def test_a_tile_is_found_or_it_is_said_why_not(limit, width, launched):
    (gpu, grids), (dim, dtype) = launched, width
    inputs = [x.detach() for x in _inputs(1, 2, 40, dtype=dtype, D=dim)]
    with gpu(limit, dtype.itemsize), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fa.attention(*inputs, backend="triton")
        except NotImplementedError as error:
            said = str(error)
            assert limit < 99 * KB and "OutOfResources" in said and str(limit) in said and "shared memory" in said
            assert "too little of that for every tile" in said
            assert fa.explain(*inputs).backend == "naive" and fa.attention(*inputs).shape == inputs[0].shape
        else:
            assert grids and fa.explain(*inputs, backend="triton").backend == "triton"


# Of the rows that GPUs with so much shared memory take; those of 8.0 are taken by the others where they have none.
FITS = {80: 163 * KB, 86: 99 * KB, 90: 227 * KB}


def compiled_tiles():
    """{(kernel, GPU, dtype, width): [bytes of shared memory of a tile]} of the report of `make compile`."""
    found = {}
    for line in TABLE.read_text().splitlines():
        row = re.match(r" +(\w+) +sm_(\d+) +(\w+) +d(\d+) .*? +w\d+ s\d+.*? +\d+ +\d+ +(\d+) ", line)
        if row:
            kernel, gpu, dtype, width, shared = row.groups()
            place = kernel, int(gpu), dtype, table.row_width(int(width))
            found.setdefault(place, []).append(int(shared))
    return found


def test_of_each_kernel_some_tile_fits_where_its_rows_are_taken():
    found = compiled_tiles()
    assert len(found) > 50 and {gpu for _, gpu, *_ in found} >= {80, 90}
    too_large = {place: shared for place, shared in found.items() if min(shared) > FITS.get(place[1], 99 * KB)}
    assert not too_large
