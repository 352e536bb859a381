"""The CSV that every benchmark writes: one row a case, provider and mode.

Its columns are kept for good, and new ones come last.
"""

import collections
import csv
import datetime
import pathlib
import subprocess

import torch

from fusedattn.cli.machine import versions

from .cases import Case

_MACHINE = "commit date gpu driver cuda torch triton python"
_NUMBERS = "ms_p20 ms_p50 ms_p80 tflops gbps peak_mib err_max err_eager matmul_tflops copy_gbps"
_SIZES = "dtype B Hq Hkv Sq Sk D Dv causal options"
COLUMNS = (*f"{_MACHINE} mode provider {_SIZES} {_NUMBERS} status ms_min ms_wall".split(),)
_COUNTS = ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv", "causal")
_MEASURED = (*_NUMBERS.split(), "ms_min", "ms_wall")
_NEW = 2  # how many of the last columns older files lack, some or all


class Row(collections.namedtuple("Row", COLUMNS, defaults=[""] * _NEW)):
    """The columns, in their order, as README.md here has them: numbers, or "" for what was not measured."""

    @property
    def case(self) -> Case:
        """The Case that the row is of."""
        return Case(*(getattr(self, name) for name in Case._fields))._replace(causal=bool(self.causal))


def _output(*command):
    """What a command prints, stripped; "" if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit():
    """The commit of this checkout, with a + where files differ from it; "unknown" outside of one."""
    here = pathlib.Path(__file__).resolve()
    git = ("git", "-c", "safe.directory=*", "-C", str(here.parent))
    if not _output(*git, "ls-files", here.name):  # an installed copy may lie inside somebody else's repository
        return "unknown"
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return _output(*git, "rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def machine(device, commit_name=None):
    """The first columns of every row of one run, as a dict."""
    on_gpu, known = torch.device(device).type == "cuda", versions()
    about = {name: known[name] or "" for name in ("driver", "cuda", "torch", "triton", "python")}
    about |= dict(commit=commit_name or commit(), gpu=torch.cuda.get_device_name(device) if on_gpu else "cpu")
    about["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {name: about[name] if on_gpu or name not in ("driver", "cuda") else "" for name in _MACHINE.split()}


def row(machine, mode, provider, case, *, options=None, status="ok", **measured):
    """A Row of a case. options replaces the case's; columns that are not in `measured` are "" in the row."""
    sizes = case._asdict() | {"causal": int(case.causal)} | ({} if options is None else {"options": options})
    measured = dict.fromkeys(_MEASURED, "") | measured | dict(status=" ".join(str(status).split()))  # one line
    return Row(**machine, mode=mode, provider=provider, **sizes, **measured)


def _text(value):
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Writer:
    """Appends rows to a CSV file, each on disk before the next is measured. Without a path it only keeps them."""

    def __init__(self, path=None):
        self.path = None if path is None else pathlib.Path(path)
        if self.path and self.path.exists() and not self.path.is_file():
            raise ValueError(f"{path or 'an empty name'} is no file")  # a device may have no end
        if self.path and not self.path.parent.is_dir():
            raise ValueError(f"there is no folder {self.path.parent}")
        self.columns, self.rows = _read(self.path) if self.path and self.path.exists() else (COLUMNS, [])
        if self.path and not self.path.exists():
            self._append(COLUMNS)

    def _append(self, values):
        with open(self.path, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(map(_text, values))

    def write(self, row):
        row = Row(*(float(_text(value)) if isinstance(value, float) else value for value in row))  # as it will be read
        self.rows.append(row)
        if self.path:
            self._append(row[: len(self.columns)])


def read(path):
    """The rows of a CSV file, numbers as numbers. A last line that was cut off is left out."""
    return _read(path)[1]


def last_run(rows):
    """The rows of the last run in a file: ratios are of one run alone."""
    return [row for row in rows if row.date == rows[-1].date] if rows else []


def _read(path):
    """(its columns, its rows)"""
    with open(path, newline="") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header not in (COLUMNS[: len(COLUMNS) - new] for new in range(_NEW + 1)):
            raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, got {', '.join(header)}")
        kinds = [int if name in _COUNTS else float if name in _MEASURED else str for name in header]
        lines = (zip(kinds, line, strict=True) for line in reader if len(line) == len(header))
        return header, [Row(*(kind(text) if text else "" for kind, text in line)) for line in lines]
