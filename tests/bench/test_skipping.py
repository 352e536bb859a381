"""What skipping computes, beside the dense grid of pairs, and the benchmark that says so."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from fusedattn.bench import cases, rows
from fusedattn.bench.dev import questions, skipping

from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.launch import tiles as configs
from fusedattn.naive import formula


def test_documents_and_lengths_are_what_a_case_says():
    case = cases.SKIPPING[1]
    owner = case.documents("cpu")
    assert owner.unique().tolist() == list(range(8)) and (owner.diff() >= 0).all() and len(owner) == case.Sq == 16384
    assert (owner.bincount() % 64 != 0).sum() >= 7
    case = cases.SKIPPING[0]
    assert case.lengths("cpu").sum() == case.B * case.Sq // 2 and (case.lengths("cpu") <= case.Sq).all()


def brute_force(case, tile, grain):
    """(tiles with a visible pair, of them those that take a mask) by rows and keys, from the dense grid of pairs.

    A band hides to the pair. A mask is known by the block: a row of padding does not make a block take one.
    """
    masks = case.masks("cpu")
    query = torch.zeros(case.B, 1, case.Sq, 1)
    band = formula.visible(checked(Arguments(query, query, query, **case.arguments({}))), 0, case.Sq)
    band = torch.ones(case.Sq, case.Sk, dtype=torch.bool) if band is None else band
    seen = bare = band.expand(case.B, 1, case.Sq, case.Sk)
    for name, mask in masks.items():
        mask = {"mask": mask, "key_mask": mask[:, None, None, :], "query_mask": mask[:, None, :, None]}[name]
        seen = seen & mask
    for name, mask in masks.items():
        hidden_row = ~masks["query_mask"][:, None, :, None] if "query_mask" in masks else torch.tensor(False)
        if name != "query_mask":
            bare = bare & ((mask if name == "mask" else mask[:, None, None, :]) | hidden_row)

    def each(pairs, reduce):
        return reduce(pairs.unflatten(3, (-1, tile.keys)).unflatten(2, (-1, tile.rows)), (3, 5))

    some = each(seen, torch.amax)
    return int(some.sum()), int((some & ~each(bare, torch.amin)).sum())


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="counting needs TRITON_INTERPRET=1")
COUNTED = [
    cases.Case(2, 1, 1, 256, 256, 16, 16, False, "float32", "padding=0.5"),
    cases.Case(1, 1, 1, 256, 256, 16, 16, False, "float32", "documents=3"),
    cases.Case(1, 1, 1, 256, 256, 16, 16, True, "float32", "documents=3"),
    cases.Case(1, 1, 1, 256, 256, 16, 16, False, "float32", "window=64,0"),
]


@interpreted
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_what_is_counted_is_what_the_grid_of_pairs_says(case):
    tiles = [
        ("forward", configs.Tile(64, 32, 4, 1)),
        ("dq", configs.Tile(32, 64, 4, 1)),
        ("dkdv", configs.Tile(16, 32, 4, 1)),
    ]
    for (kernel, tile), one in zip(tiles, skipping.count(case, tiles, 16), strict=True):
        assert (one.tiles, one.masked) == brute_force(case, tile, 16), kernel
        assert one.computed == one.tiles * tile.rows * tile.keys >= one.visible
        assert one.dense == case.B * 256 * 256


@interpreted
@pytest.mark.parametrize("options", ["padding=0.5", "documents=3"])
def test_marking_each_different_block_once_marks_them_all(options):
    from fusedattn.launch import blocks

    case = cases.Case(2, 1, 1, 192, 192, 16, 16, False, "float32", options)
    masks = case.masks("cpu")
    whole = blocks.block_mask(*(masks.get(name) for name in ("mask", "key_mask", "query_mask")), None, None, 16)
    assert torch.equal(skipping.block_mask(masks, 16), whole)


@interpreted
def test_padding_and_documents_compute_little_more_than_is_visible():
    """At the size of the question it is the benchmark that says so; here with tiles as much smaller as the grid is."""
    for options in ("padding=0.5", "documents=8"):
        case = cases.Case(2, 1, 1, 1024, 1024, 16, 16, False, "float32", options)
        (one,) = skipping.count(case, [("dq", configs.Tile(16, 16, 4, 1))], 16)
        assert 1 < one.ratio < skipping.GOAL, options


def test_tiles_are_small_beside_a_narrow_band():
    """Every kernel has tiles for it, whatever else a call asks for: a row of the table ends with them."""
    every_side = ((1024, 0), (0, 1024), (8, 8), (None, 0), (1024, 1024), (None, None))
    for key, load, sides in itertools.product(configs.TABLE, ("plain", "masked", "rich"), every_side):
        every = configs.tiles(*key, load)
        found = configs.tiles(*key, load, configs.narrow(*sides))
        if None in sides or sum(sides) > 2000:
            assert found == every, (key, load, sides)
        else:
            assert found and found == every[-len(found) :], (key, load, sides)
            assert all(tile.rows <= 64 and (tile.keys is None or tile.keys <= 64) for tile in found), (key, load, sides)


def test_counting_starts_an_interpreter_of_its_own(monkeypatch):
    started = []
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(
        skipping.subprocess,
        "run",
        lambda *command, env: started.append((*command, env)) or SimpleNamespace(returncode=7),
    )
    asked = ["skipping", "--device", "cpu", "--cases", "tiny-skipping"]
    assert questions.main(asked) == 7
    ((command, environment),) = started
    assert command[1:] == ["-m", "fusedattn.bench", *asked] and environment["TRITON_INTERPRET"] == "1"


@interpreted
def test_counts_are_printed(monkeypatch, capsys):
    monkeypatch.setitem(cases.TABLES, "tiny-skipping", [COUNTED[1]._replace(Sq=512, Sk=512)])
    assert questions.main(["skipping", "--device", "cpu", "--cases", "tiny-skipping"]) == 0
    text = capsys.readouterr().out
    assert text.count("of all pairs are visible") == 1 and text.count("    forward ") == 1


def test_the_time_of_masks_is_written_as_rows(tmp_path, at_once):
    writer, machine = rows.Writer(tmp_path / "a.csv"), rows.machine("cpu", "abc")
    chosen = [case._replace(Sq=64, Sk=64) for case in cases.TINY_SKIPPING[1:]]
    options = questions.engine_parser("skipping", "").parse_args(["--device", "cpu", "--repeat-ms", "1"])
    assert skipping.time_all(chosen, writer, machine, options)
    found = {(row.options, row.mode, row.provider): row.status for row in rows.read(tmp_path / "a.csv")}
    for mode in ("forward", "backward"):
        assert found["documents=3", mode, "fusedattn:naive"] == found["", mode, "fusedattn:naive"] == "ok"
        assert found["documents=3", mode, "fusedattn+plan:naive"] == "ok"
    assert found["documents=3", "plan", "fusedattn+plan"] == found["window=64,0", "plan", "flex"] == "ok"
    assert ("window=64,0", "plan", "fusedattn+plan") not in found
    over = list(skipping.over_dense(writer.rows))
    assert len(over) == 6 and all(line.endswith(": 1.00 of dense") for line in over)  # all take 2 ms here
