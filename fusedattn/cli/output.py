"""Output of the commands: text and tables, or one JSON object, and a progress bar if rich is installed."""

import contextlib
import difflib
import importlib.util
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any


class Problem(Exception):
    """Error of a command that cannot run. Its message is one line."""


def check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.7)
            hint = f": did you mean {near[0]}?" if near else ""
            raise Problem(f"{option}: expected one of {', '.join(known)}, got {name or 'nothing'}{hint}")


def check_file(option: str, path: str) -> None:
    if Path(path).is_dir():  # "" names the current folder
        raise Problem(f"{option}: expected the name of a file, got {'the folder ' * bool(path)}{path!r}")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise Problem(f"{option}: expected a file in a folder that exists, got {path}: create {folder} first")


class Output:
    """Printer of text and tables, or with `only_json` of one JSON object."""

    def __init__(self, only_json: bool):
        self.only_json = only_json

    def say(self, text: str) -> None:
        if not self.only_json:
            print(text)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        cells = [[str(cell) for cell in row] for row in (head, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
        self.say("\n".join([title, *lines, ""]))

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """Yield advance(note), which moves a progress bar on stderr if that is a terminal and rich is installed."""
        if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
            yield lambda note: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda note: bar.update(task, advance=1, description=note.replace("[", r"\["))

    def finish(self, answer: dict[str, Any]) -> None:
        """Print `answer` as JSON if `only_json` is set. NaN and infinity become null."""
        if self.only_json:
            print(json.dumps(json.loads(json.dumps(answer), parse_constant=lambda _: None), indent=2))
