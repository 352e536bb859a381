"""What a command shows: tables and a progress bar through rich, the same in plain text without it, or a JSON object."""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..testing.tolerance import Verdict

PICTURE, PNG = 2**20, b"\x89PNG"  # bytes that a disk must have left for one, and what it begins with


class Problem(Exception):
    """A command cannot run; its message is one line for the user."""


def need(*packages: str) -> None:
    """Raise a Problem that says how to install what is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"{' and '.join(missing)} not installed: pip install 'fusedattn[bench]'")


def check_output(option: str, path: str) -> None:
    """Raise a Problem where no picture can be written: before the work whose result it is to hold."""
    file = Path(path)
    if not path:
        raise Problem(f"{option}: expected the name of a file, got an empty one")
    if not file.resolve().parent.is_dir():
        raise Problem(f"{option}: there is no folder {file.resolve().parent}")
    if file.is_dir():
        raise Problem(f"{option}: {path} is a folder")
    if file.suffix.lower() != ".png":  # a slip would write over something else
        raise Problem(f"{option}: expected a name that ends in .png, got {path}")
    if file.is_file() and file.stat().st_size:
        with writing(option, path), open(file, "rb") as other:
            if other.read(len(PNG)) != PNG:
                raise Problem(f"{option}: {path} is there, and is no PNG that may be drawn over")
    if not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
        raise Problem(f"{option}: this user may not write {path}")
    if os.access(file.resolve().parent, os.W_OK):  # else the file is there, and may have room
        with writing(option, path), tempfile.TemporaryFile(dir=file.resolve().parent) as space:
            space.write(bytes(PICTURE))


@contextlib.contextmanager
def writing(option: str, path: str | None) -> Iterator[None]:
    """Inside, an OSError, as of a disk that is full, is a Problem of a file that is written."""
    try:
        yield
    except OSError as error:
        raise Problem(f"{option}: cannot write {path}: {error.strerror or error}") from error


def _has_gone() -> NoReturn:
    raise BrokenPipeError


class Screen:
    """Where one command writes. With `only_json` all but `finish` is silent. Without rich the same is plain text."""

    def __init__(self, only_json: bool):
        self.only_json = only_json
        self.console: Any = None
        if not only_json and importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            # Not a terminal: a log, where tables may be as wide as they are.
            width = None if sys.stdout.isatty() else 140
            # A user's text is shown as it is: in it [bold] and :smile: are no commands.
            self.console = Console(highlight=False, markup=False, emoji=False, width=width)
            self.console.on_broken_pipe = _has_gone  # rich would end with status 1, which says that something is wrong

    def say(self, text: str = "", style: str | None = None) -> None:
        encoding = sys.stdout.encoding or "ascii"
        text = text.encode(encoding, errors="replace").decode(encoding)  # a terminal may lack letters of a user's text
        if self.console:
            self.console.print(text, style=style)
        elif not self.only_json:
            print(text)

    def table(self, title: str, columns: list[str], rows: list[list[Any]], coloured: bool = False) -> None:
        """Cells are text, numbers, or None for what there is none of. `coloured` are "ok" and "FAIL"."""
        rows = [[_text(cell) for cell in row] for row in rows]
        if not self.console:
            self.say("\n".join(_aligned(title, columns, rows)))
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.show_header = any(columns)
        for column in columns:
            table.add_column(column)
        for row in rows:
            styles = [
                "" if not coloured else "bold red" if "FAIL" in cell else "green" * (cell == "ok") for cell in row
            ]
            table.add_row(*map(Text, row, styles))
        self.console.print(table)

    def verdicts(
        self, title: str, verdicts: Mapping[str, Mapping[str, Verdict]], order: Iterable[str] | None = None
    ) -> None:
        """A table of {what: {result: verdict}}: a row a `what`, a column a result, at the end whether all are right."""
        names = dict.fromkeys(name for row in verdicts.values() for name in row)
        results, rows = [name for name in order or names if name in names], []
        for what, row in verdicts.items():
            right = "ok" if all(one.ok for one in row.values()) else "FAIL"
            cells = [compared(row[name]) if name in row else "" for name in results]
            rows.append([what, *cells, right if row else "left out"])
        self.table(title, ["", *results, ""], rows, coloured=True)

    def failures(self, verdicts: Mapping[str, Mapping[str, Verdict]], where: str = "") -> int:
        """Say of each verdict that is wrong why, and return how many these are."""
        wrong = [(what, name, one.why) for what, row in verdicts.items() for name, one in row.items() if not one.ok]
        for what, name, why in wrong:
            self.say(f"FAIL {where}{what}, {name}: {why}", style="red")
        return len(wrong)

    @contextlib.contextmanager
    def progress(self, title: str, total: int):
        """A bar on stderr; yields advance(note). Nothing where there is no terminal or, with JSON, no rich."""
        if importlib.util.find_spec("rich") is None:
            yield lambda note="": None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        first, last = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
        columns = first, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), last
        console = Console(stderr=True)
        shown = Progress(*columns, console=console, transient=True)
        with shown if console.is_terminal else contextlib.nullcontext():
            task = shown.add_task(title, total=total, note="")
            yield lambda note="": shown.update(task, advance=1, note=note)

    def finish(self, answer: dict) -> None:
        """The JSON object, if that is what was asked for: what JSON cannot write, NaN and infinity, is null."""
        if self.only_json:
            print(json.dumps(json.loads(json.dumps(answer), parse_constant=lambda _: None), indent=2))


def listed(verdicts: Mapping[str, Mapping[str, Verdict]], what: str = "what") -> list[dict]:
    """Verdicts as a JSON object has them: {what: ..., "result": ...} with the fields of each."""
    return [
        {what: key, "result": name} | verdict._asdict()
        for key, results in verdicts.items()
        for name, verdict in results.items()
    ]


def error(number: float) -> str:
    """An error in few letters: 3.6e-4."""
    if not math.isfinite(number) or number == 0.0:
        return f"{number:.0f}"
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def compared(verdict: Verdict) -> str:
    """A cell: the largest error of a result, that of eager PyTorch, and whether it is too large."""
    cell = f"{error(verdict.max_error)} / {error(verdict.max_eager)}"
    return cell if verdict.ok else f"{cell} FAIL"


def tick() -> str:
    """What stands for "right", where it can be written."""
    return "\u2713" if "\u2713".encode(sys.stdout.encoding or "ascii", errors="ignore") else "ok"


def _text(cell):
    return "-" if cell is None else f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def _aligned(title, columns, rows):
    """The lines of a table in plain text; a cell may have several."""
    rows = [line for row in rows for line in itertools.zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows] if any(columns) else rows
    for line in [[title], *lines, []]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
