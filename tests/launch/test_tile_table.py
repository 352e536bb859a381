"""Every call has a tile on every GPU, of sizes that kernels take."""

import itertools

from fusedattn.launch import tile_table as table

GPUS = (80, 86, 87, 89, 90, 100, 103, 120, 121)
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADS = ("plain", "masked", "rich")


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def test_every_call_has_a_tile_on_every_gpu():
    missing = []
    for kernel, gpu, size, width, load, narrow in itertools.product(
        table.INTERPRETED, GPUS, (2, 4), WIDTHS, LOADS, (False, True)
    ):
        if width > table.ONE_PASS and kernel in ("one_pass", "postprocess"):
            continue
        found = table.tiles_for(kernel, gpu, size, width, load, narrow=narrow)
        if not found or (narrow and max(max(tile.rows, tile.keys or 0) for tile in found) > 64):
            missing.append((kernel, gpu, size, width, load, narrow, found))
    assert not missing


def test_sizes_are_what_kernels_take():
    wrong = []
    for place, tiles in [
        *(table.TABLE | table.MASKED | table.RICH | table.INTERPRETED).items(),
        *table.CANDIDATES.items(),
    ]:
        for tile in tiles:
            sizes = [tile.rows, tile.warps, *([tile.keys] if tile.keys else [])]
            multiplies = tile.keys is not None
            small = multiplies and min(tile.rows, tile.keys) < 16
            if not all(map(power_of_two, sizes)) or small or tile.stages < 1 or tile.spills < 0:
                wrong.append((place, tile))
        if len(set(tiles)) < len(tiles):
            wrong.append((place, "the same tile twice"))
    assert not wrong


def test_candidates_are_no_tiles_that_calls_take_anyway():
    for place, tiles in table.CANDIDATES.items():
        assert place in table.TABLE and not {*map(table.same, tiles)} & {*map(table.same, table.TABLE[place])}
        assert table.candidates(*place) == (*map(table.same, (*table.TABLE[place], *tiles)),)
        assert table.candidates(*place, "rich") == (*map(table.same, table.tiles_for(*place, "rich")),)
    for capability, pipelines in {80: 0, 86: 0, 90: 16, 120: 0}.items():
        every = itertools.product(table.ON_HOPPER, (capability,), (2, 4), (64, 128, 256), ("plain", "rich"))
        assert sum(len(table.candidates(*place)) for place in every) == pipelines
    assert table.candidates("two_passes", 90, 2, 64) == (None,) and not table.candidates("one_pass", 90, 2, 256)


def test_the_form_of_long_calls_is_not_that_of_short_ones_though_it_is_the_fastest_of_a_file():
    long, (short, *_) = table.HOPPER_LONG[64][1], table.HOPPER[64]
    for length, ranked, first in (
        (2047, (long, short), short),
        (2048, (long, short), long),
        (2048, (short, long), short),
    ):
        forms = table.forms_on_hopper("hopper", 64, length, "full", ranked)
        assert forms[0] == first and {*forms} == {*table.HOPPER[64]}, "a file comes before the table"


def test_a_pipeline_for_every_width():
    assert [table.row_width(width) for width in (1, 16, 64, 65, 128, 129, 256)] == [64, 64, 64, 128, 128, 256, 256]
    for pipelines in table.HOPPER.values():
        for each in pipelines:
            launched, many, few = table.REGISTERS[each.warpgroups]
            assert each.rows == 64 * each.warpgroups and (each.warpgroups == 2 or not each.ping_pong)
            assert many * each.warpgroups + few <= launched * (each.warpgroups + 1), "it would wait for ever"


def test_shares_of_keys_fill_the_gpu_and_none_is_empty():
    for programs, blocks, places in itertools.product((1, 3, 8, 64, 200, 500), (1, 4, 5, 33, 512, 4097), (1, 46, 132)):
        n = table.splits(programs, blocks, places)
        assert 1 <= n <= min(table.MOST_SPLITS, blocks), (programs, blocks, places, n)
        assert -(-blocks // n) * (n - 1) < blocks, (programs, blocks, places, n)
        if programs >= 2 * places or blocks <= 4:
            assert n == 1, (programs, blocks, places, n)
    assert 0.85 * table.MOST_SPLITS < table.splits(1, 4096, 132) and table.splits(132, 64, 132) == 2
    assert [table.splits(9, blocks, None) for blocks in (0, 1, 2, 9)] == [1, 1, 2, 2]
