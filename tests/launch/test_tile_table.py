"""Tests that each call has a tile on each GPU, of a size that the kernels support."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.launch import tile_table as table, tuned
from fusedattn.launch.decode import splits
from fusedattn.launch.forward import _fastest

GPUS = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
OPTIONS = {"plain": {}, "masked": dict(key_mask=True), "rich": dict(softcap=2.0, bias=True)}


@pytest.mark.parametrize("backend, gpus", [("triton", GPUS), ("hopper", [(9, 0)])], ids=["triton", "hopper"])
@pytest.mark.parametrize("rows", [300, 3])
def test_every_call_has_tiles_on_every_gpu(rows, backend, gpus):
    rich = OPTIONS if backend == "triton" else ["plain"]
    dtypes = (torch.bfloat16, torch.float32) if backend == "triton" else (torch.bfloat16,)
    for gpu, dtype, dim, name in itertools.product(gpus, dtypes, (8, 64, 80, 128, 256, 320, 512), rich):
        query, key = (torch.empty(1, 2, n, dim, dtype=dtype, device="meta") for n in (rows, 300))
        drawn = dict(bias=query[0, 0, :, :1].expand(rows, 300), key_mask=key[0, :1, :, 0] > 0)
        options = OPTIONS[name] | {k: x for k, x in drawn.items() if k in OPTIONS[name]}
        found = fa.explain(query, key, key, **options, backend=backend, capability=gpu)
        assert found.backend == backend and len(found.tiles) >= 3, (gpu, dtype, dim, name, str(found))
        for kernel, tile in found.tiles.items():
            sizes = [getattr(tile, x) for x in ("rows", "keys", "warps") if getattr(tile, x, None)]
            # Hopper's kernels have 64 rows for each of two or three warpgroups.
            powers = all(n & (n - 1) == 0 for n in sizes) or kernel == "hopper" and tile.rows == 64 * tile.warpgroups
            assert powers and min(tile.rows, getattr(tile, "keys", None) or 16) >= 16, (kernel, tile)
            assert rows > 64 or kernel != "forward" or max(sizes[:2]) <= 64, tile


def test_candidates_are_no_tiles_that_calls_take_anyway():
    for place, tiles in tuned.CANDIDATES.items():
        assert place in table.TABLE and not {*map(table.same, tiles)} & {*map(table.same, table.TABLE[place])}
        assert tuned.candidates(*place) == (*map(table.same, (*table.TABLE[place], *tiles)),)
        assert tuned.candidates(*place, "rich") == (*map(table.same, table.tiles_for(*place, "rich")),)
    assert tuned.candidates("two_passes", 90, 2, 64) == (None,) and not tuned.candidates("one_pass", 90, 2, 256)


@pytest.mark.parametrize("registers", [table.REGISTERS, table.CLEANING_REGISTERS])
def test_a_pipeline_asks_for_no_more_registers_than_there_are(registers):
    for pipelines in table.HOPPER.values():
        for each in pipelines:
            launched, many, few = registers[each.warpgroups]
            assert many * each.warpgroups + few <= launched * (each.warpgroups + 1), "it would wait for ever"


def test_shares_of_keys_fill_the_gpu_and_none_is_empty():
    for programs, blocks, places in itertools.product((1, 8, 64, 211, 500), (1, 4, 5, 33, 1000), (1, 46, 132)):
        n = splits(programs, blocks, places)
        assert 1 <= n <= min(table.MOST_SPLITS, blocks), (programs, blocks, places, n)
        assert -(-blocks // n) * (n - 1) < blocks, (programs, blocks, places, n)
        if programs >= 2 * places or blocks <= 4:
            assert n == 1, (programs, blocks, places, n)
    # 211 * 5 = 1055 programs fit in 8 * 132 = 1056 places. Six splits would need a second wave.
    assert [splits(*x, 132) for x in ((211, 1000), (8, 128), (1, 1000), (132, 64))] == [5, 32, 112, 2]
    assert [splits(9, blocks, None) for blocks in (0, 1, 2, 9)] == [1, 1, 2, 2]


def test_calls_with_few_blocks_of_rows_and_many_keys_are_split():
    us, merged = table.BLOCK_US[128], 1.4
    assert _fastest(32, 128, *us, merged, 132) == 4
    for blocks, steps in ((132, 128), (528, 8), (64, 1), (1, 1), (0, 0)):
        assert _fastest(blocks, steps, *us, merged, 132) == 1, (blocks, steps)
