"""Tests whole calls: the PTX of their kernels runs on an emulated GPU."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.launch import tile_table

from .. import sample
from . import calls, memory
from .cases import HOPPER, WIDE_HEADS, dense
from .conftest import CAPABILITIES, TILES, each_once
from .device import gpu

BYTES, WORDS = "masks.0.0", "rules.0.3.1"  # arguments that are a mask of pairs


def test_a_call_by_its_compiled_kernels(entry, capability, tile):
    outcome = calls.execute(entry, capability, tile)
    assert not outcome.wrong(), "\n".join(outcome.wrong())


@pytest.mark.parametrize("call, capability", sample.one_in(326, sample.product(WIDE_HEADS, CAPABILITIES)[::-1]))
def test_wide_heads_with_each_option(call, capability):
    outcome = calls.execute(call, capability)
    assert not outcome.wrong(), "\n".join(outcome.wrong())


def _first(capability):
    """Yield the first tile in the tile table for each kernel and kind of call, as a Taken."""
    axes = tile_table.INTERPRETED, (2, 4), tile_table.WIDTHS, ("plain", "masked", "rich"), (False, True)
    for kernel, itemsize, width, load, narrow in itertools.product(*axes):
        if kernel not in ("one_pass", "postprocess") or width <= tile_table.ONE_PASS:
            tiles = tile_table.tiles_for(kernel, capability, itemsize, width, load)
            for tile in (tile_table.small_enough(tiles) if narrow else tiles)[:1]:
                yield calls.Taken(kernel, itemsize, width, tile)
    if capability == HOPPER:
        for kernel, rows in tile_table.ON_HOPPER.items():
            yield from (calls.Taken(kernel, 2, width, forms[0]) for width, forms in rows.items())
        for width, pipelines in tile_table.HOPPER.items():
            if width > 64:  # the last one is for options, the last one of 64 for long calls
                yield calls.Taken("hopper", 2, width, pipelines[-1])


@pytest.mark.matrix
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_make_test_all_executes_every_first_tile(capability):
    named = [entry for entry, on in each_once() if on == capability]
    taken = [calls.taken(entry, capability) for entry in (*named, *WIDE_HEADS)]
    assert set(_first(capability)) <= set().union(*taken)


def test_no_row_has_more_tiles_than_everything_executes():
    tables = tile_table.TABLE, tile_table.RICH, tile_table.MASKED, tile_table.HOPPER
    assert max(len(row) for table in tables for row in table.values()) == TILES


@pytest.mark.matrix
@pytest.mark.parametrize("width", [256, 512])
@pytest.mark.parametrize("packed", [{}, dict(B=2, Hq=6, Hkv=3, lengths=((70, 9), (33, 100)))], ids=["dense", "packed"])
def test_heads_whose_gradients_of_scores_are_stored_at_a_time(packed, width, monkeypatch):
    """The stored backward is right if it processes kv heads in chunks, two of three; the third call is a replay.

    Each kv head has two query heads. One program computes all blocks of dq of two heads, and one all blocks of dk.
    """
    monkeypatch.setattr(tile_table, "SCORES_BYTES", 2 * 2 * 128 * (384 if packed else 100))
    fields = dict(B=3, Hq=2, Hkv=1, D=width, Sq=70, Sk=100, backend="hopper", two_passes=True, times=3)
    outcome = calls.execute(*dense(("at a time", fields | dict(multiprocessors=1) | packed)), HOPPER)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    names = [x.name for x in outcome.device.launches]
    each = ["stored_backward", *["grad_product"] * 2] if width == 256 else ["wide_backward", *["grad_product"] * 3]
    assert names[-2 * len(each) :] == each * 2


PACKED = dict(B=2, Sq=70, Sk=104, lengths=((70, 9), (33, 104)))
IN_PARTS = {
    "rows, the first see no key": dict(causal=True, Sk=100, mask="pairs"),
    "rows, causal, called again": dict(causal=True, times=3),
    "rows, window, dropout D512": dict(window=(40, 20), dropout=0.3, D=512),
    "rows, top left, slopes": dict(align="top_left", window=(90, 1), alibi="own"),
    "rows, plan D512": dict(mask="pairs", plan=True, D=512),
    "rows, bias over batch, query mask, sinks": dict(bias="heads", query_mask="own", sinks=True, B=2),
    "once, all rows, called again": dict(Sq=100, times=3),
    "rows, the last alone, bias": dict(bias="pairs", Sq=257),
    "rows, four options D320": dict(bias="pairs", alibi="own", dropout=0.2, softcap=5.0, D=320, Dv=512),
    "heads, causal, called again": PACKED | dict(causal=True, times=3),
    "heads, mask, key mask": PACKED | dict(mask="heads", key_mask="own"),
    "heads, mask, maximum of more rows than all have": dict(
        mask="heads", B=3, Sq=200, lengths=((70, 9, 33), (33, 104, 20))
    ),
    "whole, dropout": PACKED | dict(dropout=0.3),  # which counts the heads of a call
    "heads, slopes, sinks": PACKED | dict(alibi="own", sinks=True, causal=True),
    "heads, bias over batch D512": PACKED | dict(bias="heads", window=(40, 20), D=512),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_whose_gradients_of_scores_are_stored_at_a_time(name, monkeypatch):
    """The stored backward is right for 128 rows, or one query head of two, at a time. Such calls are not recorded."""
    fields = dict(Hq=2, Hkv=1, D=256, Sq=300, Sk=200, backend="hopper") | IN_PARTS[name]
    most = 128 * (512 if "lengths" in fields else fields["Sk"] * (1 if fields["Sq"] < 128 else 2)) * 2
    monkeypatch.setattr(tile_table, "SCORES_BYTES", most)
    outcome = calls.execute(*dense((name, fields)), HOPPER)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    stored = [x for x in outcome.device.launches if x.name in ("stored_backward", "wide_backward")]
    assert len(stored) == dict(rows=3, once=1, heads=2, whole=1)[name.partition(",")[0]]


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.one_in(2)
def test_passes_read_an_eighth_of_the_bytes_of_a_mask(plan, monkeypatch):
    """Each pass reads a bit for each pair. Packing a dense mask reads its bytes once. Equal for all lengths."""
    read, load = {}, memory.GlobalMemory.load_global

    def counted(self, m, pointer, offset, dtype, n, line):
        allocation, at = self.global_at(m, pointer, offset, n * np.dtype(dtype).itemsize, line)
        blocks, first = self.number[self.lanes(m)].tolist(), at.tolist()  # a byte counts once in each thread block
        read.setdefault((allocation.name, self), set()).update(
            (block, x + i) for block, x in zip(blocks, first, strict=True) for i in range(n * np.dtype(dtype).itemsize)
        )
        return load(self, m, pointer, offset, dtype, n, line)

    monkeypatch.setattr(memory.GlobalMemory, "load_global", counted)
    (entry,) = dense(("bytes", dict(mask="pairs", plan=plan, Sq=64, Sk=512, D=16, Hq=1)))
    outcome = calls.execute(entry, 80)
    assert not outcome.wrong()
    of = {key: sum(len(places) for (name, _), places in read.items() if name == key) for key in (BYTES, WORDS)}
    assert of == {BYTES: 0 if plan else 64 * 512, WORDS: 2 * 64 * 512 // 8}


@pytest.mark.matrix
def test_rows_outside_all_sequences_change_no_gradient_of_sinks(poison, unchecked):
    *inputs, incoming = torch.randn(4, 160, 2, 64, dtype=torch.bfloat16)
    ends, sinks, results = torch.tensor([0, 70, 150], dtype=torch.int32), torch.rand(2, requires_grad=True), []
    with gpu(HOPPER) as device:
        for rows in (150, 160):
            own = [x[:rows].clone().requires_grad_() for x in inputs]
            out = fa.attention_varlen(*own, ends, ends, sinks=sinks, backend="hopper")
            results.append(torch.autograd.grad(out[:150], (sinks, *own), incoming[:150])[0])
    assert [x.name for x in device.launches].count("backward") == 2
    assert torch.equal(*results)
