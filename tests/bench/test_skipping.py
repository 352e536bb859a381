"""The benchmark of skipping: its cases, the tiles that a narrow band takes, and its rows."""

import itertools

from fusedattn.bench import cases, rows
from fusedattn.bench.dev import questions, skipping

from fusedattn.launch import tiles as tile_table


def test_documents_and_lengths_are_what_a_case_says():
    case = cases.SKIPPING[1]
    owner = case.documents("cpu")
    assert owner.unique().tolist() == list(range(8)) and (owner.diff() >= 0).all() and len(owner) == case.Sq == 16384
    assert (owner.bincount() % 64 != 0).sum() >= 7
    case = cases.SKIPPING[0]
    assert case.lengths("cpu").sum() == case.B * case.Sq // 2 and (case.lengths("cpu") <= case.Sq).all()


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
