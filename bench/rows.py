"""The CSV that every benchmark writes: one row a case, provider and mode.

Its columns are kept for good, and new ones come last.
"""

import csv
import datetime
import pathlib
import platform
import subprocess
from typing import NamedTuple

import torch

from .cases import Case


class Row(NamedTuple):
    """The columns, in their order. peak_mib is what a step adds to memory at its peak; "" is what was not measured."""

    commit: str
    date: str  # when the run began
    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    python: str
    # forward, backward, forward_backward, wall, wall_forward_backward, graph, train, decode, host, plan, or a kernel
    mode: str
    provider: str  # fusedattn:KERNEL, fusedattn+plan:KERNEL, naive, sdpa:flash, sdpa:cudnn, sdpa:efficient, flex, ...
    dtype: str
    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    causal: int  # 0 or 1
    options: str
    ms_p20: float
    ms_p50: float
    ms_p80: float
    tflops: float
    gbps: float
    peak_mib: float
    err_max: float
    err_eager: float
    matmul_tflops: float  # what this machine reached in the same run, in the dtype of the row
    copy_gbps: float
    status: str  # ok, oom, wrong, unchecked: WHY, unsupported: WHY
    ms_min: float | str = ""

    @property
    def case(self) -> Case:
        """The Case that the row is of."""
        return Case(**{name: getattr(self, name) for name in Case._fields})._replace(causal=bool(self.causal))


COLUMNS = Row._fields
_COUNTS = ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv", "causal")
_MEASURED = (*COLUMNS[COLUMNS.index("ms_p20") : COLUMNS.index("status")], "ms_min")
_NEW = 1  # how many of the last columns older files lack


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
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = ""
    on_gpu = torch.device(device).type == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else ""
    return dict(
        commit=commit_name or commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        gpu=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        driver=driver.splitlines()[0] if driver else "",
        cuda=(torch.version.cuda or "") if on_gpu else "",
        torch=torch.__version__,
        triton=triton_version,
        python=platform.python_version(),
    )


def row(machine, mode, provider, case, *, options=None, status="ok", **measured):
    """A Row of a case. options replaces the case's own; columns that are not in `measured` are "" in the row."""
    sizes = case._asdict() | {"causal": int(case.causal)} | ({} if options is None else {"options": options})
    status = " ".join(str(status).split())  # one line, whatever an error said
    return Row(
        **machine, mode=mode, provider=provider, **sizes, **dict.fromkeys(_MEASURED, "") | measured, status=status
    )


def _text(value):
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Writer:
    """Appends rows to a CSV file, each on disk before the next is measured. Without a path it only keeps them."""

    def __init__(self, path=None):
        self.path = pathlib.Path(path) if path else None
        self.columns, self.rows = _read(self.path) if self.path and self.path.exists() else (COLUMNS, [])
        if self.path and not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(COLUMNS)

    def _append(self, values):
        with open(self.path, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([_text(value) for value in values])

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
        if header not in (COLUMNS, COLUMNS[:-_NEW]):
            raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, got {', '.join(header)}")
        absent = dict.fromkeys(COLUMNS, "")
        lines = [line for line in reader if len(line) == len(header)]
        return header, [_parsed(absent | dict(zip(header, line, strict=True))) for line in lines]


def _parsed(fields):
    for name in _COUNTS:
        fields[name] = int(fields[name])
    for name in _MEASURED:
        fields[name] = float(fields[name]) if fields[name] else ""
    return Row(**fields)
