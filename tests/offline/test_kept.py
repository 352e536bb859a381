"""What is compiled is kept, and compiled again after a change of what it was compiled from."""

import shutil

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import tiles

from . import compile as offline, compiled as compiling, kept
from .test_compile import GOOD

ROWS = [compiling.Row(name, 90, "bf16", 64, "full", tiles.Tile(64, 64, 4, 2), (0, 1)) for name in ("forward", "append")]


@pytest.fixture
def compiled(monkeypatch):
    """Rows that are compiled, by nobody."""
    rows = []

    class Pool:
        map = staticmethod(map)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def compile_row(row, read):
        rows.append(row)
        return GOOD._replace(registers=len(rows), asm=dict(ptx="long"))

    monkeypatch.setattr(offline, "pool", Pool)
    monkeypatch.setattr(offline, "compile_row", compile_row)
    return rows


@pytest.fixture
def changed(tmp_path):
    """changed(file): reports of the same folder, after a change of this file of the kernels."""

    def change(file=None):
        root = tmp_path / "kernels"
        shutil.copytree(kept.KERNELS, root, dirs_exist_ok=True)
        if file:
            (root / file).write_text((root / file).read_text() + "\n# another line\n")
        return kept.Kept(tmp_path / "reports", root=root)

    return change


def measure(store, rows=ROWS):
    _, reports, anew = offline.measure(rows, lambda line: None, store=store)
    return [report.registers for report in reports], anew


@pytest.mark.parametrize(
    "file, anew",
    [
        (None, []),
        ("forward.py", ["forward"]),
        ("append.py", ["append"]),
        ("dq.py", []),
        ("vocabulary/softmax.py", ["forward"]),  # no other imports it
        ("vocabulary/span.py", ["forward", "append"]),
        ("vocabulary/__init__.py", ["forward", "append"]),
    ],
    ids=str,
)
def test_a_second_run_compiles_what_changed(file, anew, compiled, changed):
    assert measure(changed()) == ([1, 2], 2)
    compiled.clear()
    numbers, count = measure(changed(file))
    assert [row.kernel for row in compiled] == anew and count == len(anew)
    if not anew:
        assert numbers == [1, 2]


def test_another_tile_version_or_way_to_read_is_another_report(compiled, changed, monkeypatch):
    store, (row, _) = changed(), ROWS
    measure(store)
    assert store.find(row) == GOOD._replace(registers=1)
    assert store.find(row._replace(tile=tiles.Tile(64, 32, 4, 2))) is None
    assert kept.Kept(store.folder, read=True, root=store.root).find(row) is None
    monkeypatch.setattr(kept, "host", lambda: "another launch")
    assert store.find(row) is None
    monkeypatch.undo()
    monkeypatch.setattr(kept.triton, "__version__", "1.0")
    assert store.find(row) is None


def test_a_table_of_tiles_is_no_part_of_the_launch():
    text = kept.pathlib.Path(tiles.__file__).read_text()
    assert kept._without_tables(text.replace("Tile(128, 64, 4, 3)", "Tile(128, 64, 4, 4)")) == kept._without_tables(
        text
    )
    assert kept._without_tables(text.replace("else 64\n", "else 128\n")) != kept._without_tables(text)


def test_few_rows_are_of_every_kernel_gpu_variant_and_dtype():
    every = list(offline.table())
    few = list(offline.few(every))
    assert len(few) <= 63 < len(every)
    for what in ("kernel", "capability", "variant", "dtype"):
        assert {getattr(row, what) for row in few} == {getattr(row, what) for row in every}
    assert {(row.kernel, row.capability) for row in few} == {(row.kernel, row.capability) for row in every}
