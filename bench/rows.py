"""Rows of the CSV of all benchmarks, one for each case, provider and mode, and the versions that a row depends on."""

import collections
import csv
import datetime
import pathlib
import platform
import subprocess  # noqa: TID251 - asks git for the commit

import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

import fusedattn

from .cases import Case

_MACHINE = "commit date gpu driver cuda torch triton python".split()
_MEASURED = "ms_p20 ms_p50 ms_p80 tflops gbps peak_mib err_max err_eager".split()
_COUNTS = "B Hq Hkv Sq Sk D Dv causal".split()
COLUMNS = (*_MACHINE, "mode", "provider", "dtype", *_COUNTS, "options", *_MEASURED, "status")


class Row(collections.namedtuple("Row", COLUMNS)):
    """One row of the CSV; "" stands for a missing number."""

    @property
    def case(self) -> Case:
        return Case(*(getattr(self, name) for name in Case._fields))._replace(causal=bool(self.causal))

    @property
    def wrong(self) -> bool:
        return self.status.startswith("wrong")


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """Return the commit of this checkout, with a + if files were changed; outside a checkout "unknown"."""
    here = pathlib.Path(__file__).resolve()
    git = ("git", "-c", "safe.directory=*", "-C", str(here.parent))
    if not _output(*git, "ls-files", here.name):  # an installed copy inside another repository
        return "unknown"
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return _output(*git, "rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def versions() -> dict[str, str | None]:
    """Return the versions of software that results depend on; None for one that is missing."""
    try:
        import triton
    except Exception:  # a broken installation raises anything; `fusedattn info` lists the reason
        triton = None
    driver = get_nvidia_driver_version(run) if torch.cuda.is_available() else None
    about: dict[str, str | None] = dict(fusedattn=fusedattn.__version__, python=platform.python_version())
    about |= dict(torch=torch.__version__, triton=getattr(triton, "__version__", None), cuda=torch.version.cuda)
    return about | dict(driver=driver, system=f"{platform.system()} {platform.machine()}")


def machine(device: str, commit_name: str | None = None) -> dict[str, str]:
    about: dict = {name: version or "" for name, version in versions().items()}
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    about |= dict(commit=commit_name or commit(), date=date, gpu=gpu)
    return {name: about[name] for name in _MACHINE}


def row(machine, mode, provider, case, status="ok", **measured) -> Row:
    values = dict.fromkeys(_MEASURED, "") | measured | dict(status=" ".join(str(status).split()))  # in one line
    return Row(**machine, mode=mode, provider=provider, **case._asdict() | {"causal": int(case.causal)}, **values)


def create(path) -> None:
    """Create a CSV file if none exists. Raise ValueError if the path is a file with other columns, or not a file."""
    path = pathlib.Path(path)
    if not path.exists():
        append(path, COLUMNS)
    elif path.is_file():
        read(path)
        if not path.read_bytes().endswith(b"\n"):  # a run was killed while it wrote its last line
            with path.open("a") as file:
                file.write("\n")
    else:  # reading a device might never end
        raise ValueError(f"expected a file, got {path}")


def append(path, row) -> None:
    with open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(f"{x:.5g}" if isinstance(x, float) else x for x in row)


def read(path) -> list[Row]:
    """Return the rows of a CSV file, except for truncated lines."""
    with open(path, newline="") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header != COLUMNS:
            raise ValueError(f"{path}: expected the columns of fusedattn bench, got {', '.join(header)[:100]}")
        kinds = [int if name in _COUNTS else float if name in _MEASURED else str for name in header]
        lines = (zip(kinds, line, strict=True) for line in reader if len(line) == len(header))
        return [Row(*(kind(text) if text else "" for kind, text in line)) for line in lines]
