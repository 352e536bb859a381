"""What skipping computes, beside the dense grid of pairs, and the benchmark that says so."""

import itertools
import os

import pytest
import torch
from fusedattn.bench import cases, rows
from fusedattn.bench.dev import questions, skipping

from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.launch import tiles as tile_table
from fusedattn.launch.tiles import Tile
from fusedattn.naive.blocks import uncut
from fusedattn.naive.pairs import visible

from ..offline import skipping as counting


def test_documents_and_lengths_are_what_a_case_says():
    case = cases.SKIPPING[1]
    owner = case.documents("cpu")
    assert owner.unique().tolist() == list(range(8)) and (owner.diff() >= 0).all() and len(owner) == case.Sq == 16384
    assert (owner.bincount() % 64 != 0).sum() >= 7
    case = cases.SKIPPING[0]
    assert case.lengths("cpu").sum() == case.B * case.Sq // 2 and (case.lengths("cpu") <= case.Sq).all()


COUNTED = [
    cases.Case(2, 1, 1, 256, 256, 16, 16, False, "float32", "padding=0.4"),
    cases.Case(1, 1, 1, 256, 256, 16, 16, False, "float32", "documents=3"),
    cases.Case(1, 1, 1, 256, 256, 16, 16, True, "float32", "documents=3"),
    cases.Case(1, 1, 1, 256, 256, 16, 16, False, "float32", "window=64,0"),
]
TILES = {"forward": Tile(64, 32, 4, 1), "dq": Tile(32, 64, 4, 1), "dkdv": Tile(16, 32, 4, 1)}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="lists are made by kernels")
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_what_is_counted_is_what_the_kernels_list(case):
    """Of blocks of 16, and of 64, which are larger than some tiles."""
    from fusedattn.kernels.vocabulary.walk import ALL, SOME

    from fusedattn.launch import blocks

    masks, query = case.masks("cpu"), torch.zeros(case.B, 1, case.Sq, 16)
    call = checked(Arguments(query, query, query, **case.arguments(masks)))
    seen = torch.ones(case.B, 1, case.Sq, case.Sk, dtype=torch.bool) & visible(call, uncut(call).blocks[0])
    for size in (16, 64):
        marks = torch.full((1, 1, 1, 1), SOME.value | ALL.value, dtype=torch.uint8)
        if masks:
            marks = blocks.block_mask(
                *(masks.get(name) for name in ("mask", "key_mask", "query_mask")), None, None, size
            )
        for (kernel, tile), one in zip(TILES.items(), counting.count(case, TILES.items(), size), strict=True):
            lists = blocks.tile_lists(call, marks, size, tile, by_keys=kernel == "dkdv").base
            masked, bare = (int(lists[:, :, fully::2, 0].sum()) for fully in (0, 1))
            assert (one.tiles, one.masked) == (masked + bare, masked), (kernel, size)
            assert one.computed == one.tiles * tile.rows * tile.keys >= one.visible == seen.sum()
            assert one.dense == case.B * 256 * 256


def test_padding_and_documents_compute_little_more_than_is_visible():
    """At the size of the question it is the benchmark that says so; here with tiles as much smaller as the grid is."""
    for options in ("padding=0.5", "documents=8"):
        case = cases.Case(2, 1, 1, 1024, 1024, 16, 16, False, "float32", options)
        (one,) = counting.count(case, [("dq", Tile(16, 16, 4, 1))], 16)
        assert 1 < one.computed / one.visible < counting.GOAL, options


def test_tiles_are_small_beside_a_narrow_band():
    """Every kernel has tiles for it, whatever else a call asks for: a row of the table ends with them."""
    every_side = ((1024, 0), (0, 1024), (8, 8), (None, 0), (1024, 1024), (None, None))
    for key, load, sides in itertools.product(tile_table.TABLE, ("plain", "masked", "rich"), every_side):
        every = tile_table.tiles(*key, load)
        found = tile_table.tiles(*key, load, tile_table.narrow(*sides))
        if None in sides or sum(sides) > 2000:
            assert found == every, (key, load, sides)
        else:
            assert found and found == every[-len(found) :], (key, load, sides)
            assert all(tile.rows <= 64 and (tile.keys is None or tile.keys <= 64) for tile in found), (key, load, sides)


def test_counts_are_printed(monkeypatch, capsys):
    monkeypatch.setitem(cases.TABLES, "tiny-skipping", [COUNTED[1]._replace(Sq=512, Sk=512)])
    assert questions.main(["skipping", "--device", "cpu", "--cases", "tiny-skipping"]) == 0
    text = capsys.readouterr().out
    assert text.count("of all pairs are visible") == 1 and text.count("    forward ") == 1


def test_the_time_of_masks_is_written_as_rows(tmp_path, at_once):
    writer, machine = rows.Writer(tmp_path / "a.csv"), rows.machine("cpu", "abc")
    chosen = [case._replace(Sq=64, Sk=64) for case in cases.TINY_SKIPPING[1:]]
    words = questions.parser("skipping", "cases", "resume", "budget")
    options = words.parse_args(["--device", "cpu", "--repeat-ms", "1"])
    assert skipping.time_all(chosen, writer, machine, options)
    found = {(row.options, row.mode, row.provider): row.status for row in rows.read(tmp_path / "a.csv")}
    for mode in ("forward", "backward"):
        assert found["documents=3", mode, "fusedattn:cpu"] == found["", mode, "fusedattn:cpu"] == "ok"
        assert found["documents=3", mode, "fusedattn+plan:cpu"] == "ok"
    assert found["documents=3", "plan", "fusedattn+plan"] == found["window=64,0", "plan", "flex"] == "ok"
    assert found["window=64,0", "plan", "fusedattn+plan"] == "unsupported: there is no mask to plan"
    over = list(skipping.over_dense(writer.rows))
    assert len(over) == 6 and all(line.endswith(": 1.00 of dense") for line in over)  # all take 2 ms here
