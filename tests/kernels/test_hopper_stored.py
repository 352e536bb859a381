"""The backward for Hopper that stores gradients of scores, elsewhere as `gluon` has it; and what a slip would do."""

import itertools
import sys

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import triton.language as tl
from fusedattn.kernels.vocabulary import span
from triton.experimental import gluon as language
from triton.experimental.gluon import language as gl

import fusedattn as fa
from bench import providers
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.cli.tune import child
from fusedattn.launch import hopper, run, tiles, tuned
from fusedattn.launch.backward import passes, reasons_not_on_hopper
from fusedattn.launch.tiles import Backward

from .. import cases, sample
from ..cases import Case

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import ring, steps, stored

from . import gluon, test_hopper
from .test_hopper import check, emulate, halved, launches, slipped, slipped_in, takes

BF16 = dict(dtype=torch.bfloat16)
WIDE = dict(D=256, Dv=256)
CASES = [
    Case("many blocks", B=2, Hq=4, Hkv=2, Sq=70, Sk=50, **WIDE, **BF16),
    Case("one column more", Sq=40, Sk=50, D=136, Dv=136, **BF16),
    Case("causal", Hq=2, Hkv=1, Sq=40, Sk=50, D=192, Dv=136, causal=True, **BF16),
    Case("wide queries alone", Sq=40, Sk=33, D=200, Dv=16, **BF16),
    Case("wide values alone", Sq=40, Sk=33, D=16, Dv=200, **BF16),
    Case("values of 128", Sq=40, Sk=33, D=192, Dv=128, dtype=torch.float16),
    Case("a window", Sq=40, Sk=50, window=(9, 5), **WIDE, dtype=torch.float16),
    Case("keys that nobody sees", Sq=20, Sk=90, causal=True, align="top_left", **WIDE, **BF16),
    Case("rows that see nothing", Hkv=1, Sq=90, Sk=40, window=(20, 0), align="top_left", **WIDE, **BF16),
    Case("more queries than keys", Sq=90, Sk=41, causal=True, grads="out and lse", **WIDE, **BF16),
    Case("one key", Sq=40, Sk=1, **WIDE, **BF16),
    Case("one row", Sq=1, Sk=40, **WIDE, **BF16),
]
# The named cases that the kernel for Hopper takes, each once, with wider heads.
NAMED = [case._replace(D=144, Dv=136) for case in map(halved, cases.SINGLE + cases.SHAPES)]
NAMED = {case._replace(name=""): case for case in NAMED if takes(case)}
EACH = ["hopper_stored", "hopper_dk", "hopper_dq"]  # what is launched for some heads


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels, as they are launched."""
    return launches(monkeypatch)


@pytest.fixture(autouse=True)
def _same_bits(monkeypatch):
    """Of wide heads it is the one that has the same bits each time."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


@pytest.mark.parametrize(
    "case, form",
    [pytest.param(case, Backward(16, 2), id=case.name) for case in CASES]
    + [pytest.param(CASES[0], Backward(16, 3), id="three stages")]
    + [pytest.param(CASES[i], Backward(32, 2), id=f"{CASES[i].name}, blocks of more rows") for i in (0, 7, 8)],
)
def test_a_case(case, form, monkeypatch, launched, poison):
    """What nobody stores of scores is NaN, and so is what would be made of it."""
    emulate(monkeypatch, way_back=form)
    check(case, "cpu")
    assert launched[-3:] == EACH and not {"dq", "dkdv", "postprocess"} & {*launched}


@pytest.mark.parametrize("case", sample.one_in(2, sample.named(NAMED.values())))
def test_a_named_case(case, monkeypatch, poison):
    emulate(monkeypatch)
    check(case, "cpu")


def _at_a_time(case, monkeypatch):
    """Have gradients of scores of two kv heads, and no more, stored at a time; returns kernels and their programs."""
    monkeypatch.setattr(tiles, "SCORES_BYTES", 4 * case.Hq // case.Hkv * case.Sk * (case.Sq + 7))
    launched, run_kernel = [], run.run_kernel

    def counted(name, programs, *given, **options):
        launched.append((name, programs))
        run_kernel(name, programs, *given, **options)

    monkeypatch.setattr(run, "run_kernel", counted)
    return launched


ROUNDS = Case("rounds", B=3, Hq=2, Hkv=1, Sq=20, Sk=40, D=136, Dv=16, **BF16)


@pytest.mark.parametrize(
    "case",
    [ROUNDS, ROUNDS._replace(name="heads of a batch", B=1, Hq=3, Hkv=3), ROUNDS._replace(name="heads of three", B=3, Hq=3, Hkv=3)],
    ids=lambda case: case.name,
)
def test_heads_are_done_two_at_a_time(case, monkeypatch, poison):
    """The last of an odd number is done alone."""
    emulate(monkeypatch)
    launched = _at_a_time(case, monkeypatch)
    check(case, "cpu")
    heads, group = case.B * case.Hkv, case.Hq // case.Hkv
    want = []
    for before in range(0, heads, 2):
        some = min(2, heads - before)
        want += zip(EACH, (2 * some, 2 * some, some * group), strict=True)
    assert len(want) == 3 * (heads + 1) // 2 and launched[-len(want) :] == want and launched[-len(want) - 1][0] == "preprocess"


@pytest.mark.parametrize("case", [CASES[2], ROUNDS], ids=lambda case: case.name)
def test_bits_are_the_same_each_time(case, monkeypatch):
    """In whatever order warps and copies come."""
    emulate(monkeypatch)
    _at_a_time(case, monkeypatch)
    tensors, options = case.draw()
    inputs = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    found = []
    for seed in range(2):
        for name in EACH:
            run.KERNELS[name].random.seed(seed)
        out = fa.attention(*inputs, backend="hopper", **options)
        found.append(torch.autograd.grad(out, inputs, tensors["out"]))
    assert all(map(torch.equal, *found))


@language.jit
def _met(Met, rows, keys, left, right, TOP_LEFT: gl.constexpr, TILE: gl.constexpr):
    """What each block of rows meets, and each block of keys: (blocks, 4: begin and end of keys, and of rows)."""
    band, block = span.band(rows, keys, left, right, TOP_LEFT), gl.program_id(0)
    begin, end = stored._met(band, block * TILE, TILE)
    tl.store(Met + 4 * block, begin)
    tl.store(Met + 4 * block + 1, end)
    begin, end = stored._met(span.flip(band), block * TILE, TILE)
    tl.store(Met + 4 * block + 2, begin)
    tl.store(Met + 4 * block + 3, end)


def _check_tiles(module):
    """What the first kernel stores is what both of the others read, and has each pair that is seen."""
    kernel, size = gluon.Emulator(_met, ring, steps, module, sys.modules[__name__]), 4
    sides = None, 0, 1, 5, 9
    for rows, keys, left, right, top in itertools.product((1, 4, 7, 14), (1, 5, 8, 15), sides, sides, (False, True)):
        across, down = -(-keys // size), -(-rows // size)
        met = torch.zeros(max(across, down), 4, dtype=torch.int32)
        kernel[(len(met),)](Met=met, rows=rows, keys=keys, left=left, right=right, TOP_LEFT=top, TILE=size)
        met = met.tolist()
        read = {(r, k) for r in range(down) for k in range(*met[r][:2])}
        written = {(r, k) for k in range(across) for r in range(*met[k][2:])}
        level = 0 if top else keys - rows
        seen = {
            (r // size, k // size)
            for r, k in itertools.product(range(rows), range(keys))
            if (left is None or k >= r + level - left) and (right is None or k <= r + level + right)
        }
        assert read == written and seen <= read <= {*itertools.product(range(down), range(across))}, "tiles"
        assert all(begin <= end for each in met for begin, end in (each[:2], each[2:])), "more than none"


def test_what_is_stored_is_what_is_read():
    _check_tiles(stored)
