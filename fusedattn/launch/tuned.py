"""Tuning files: tiles and pipelines with their times. `fusedattn tune` writes them; the first call reads them.

A file is valid only with the GPU, driver, torch, Triton and package version that wrote it. Without one, the tables
of `launch.tile_table` decide. A form is a tile or a pipeline. A place is (kernel, dtype, width, pressure).
"""

import functools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..call.options import AssumedGPU, Call, Device
from ..call.private import constant
from . import tile_table
from .tile_table import Tile, row_width

SLOWER = "it was slower when `fusedattn tune` measured this GPU, so it runs only if backend='hopper' names it"
RIVALS = {"hopper": ("forward",)} | {  # kernels for any GPU that each Hopper kernel replaces
    name: ("two_passes",) if name in tile_table.REPEATABLE else ("one_pass", "two_passes")
    for name in tile_table.BACKWARDS
}
# Kernels whose forms `fusedattn tune` measures, in order. two_passes: dq and dkdv, each in its best form.
MEASURED = ("forward", "hopper", "dq", "dkdv", "one_pass", *tile_table.BACKWARDS, "two_passes")
# Further tiles of plain calls, used only if `fusedattn tune` found them faster. Some have fewer stages in less shared
# memory. Some run two programs of four warps on a multiprocessor, so that one multiplies during the other's softmax.
CANDIDATES = {
    ("forward", 90, 2, 64): (Tile(64, 128, 4, 3), Tile(128, 64, 4, 3), Tile(128, 64, 8, 3)),
    ("forward", 90, 2, 256): (Tile(128, 32, 8, 4), Tile(128, 64, 8, 2)),
    ("forward", 90, 2, 512): (Tile(64, 32, 8, 2, spills=40), Tile(64, 16, 8, 2)),
    ("dq", 90, 2, 64): (Tile(128, 128, 8, 2),),
    ("dkdv", 90, 2, 64): (Tile(64, 128, 8, 2),),
    ("dkdv", 90, 2, 128): (Tile(64, 128, 8, 2, spills=192),),
    ("dkdv", 90, 2, 256): (Tile(32, 64, 8, 2, spills=168),),
    ("one_pass", 90, 2, 64): (Tile(64, 128, 8, 2, bulk=True),),
}


class Row(NamedTuple):
    """A measured tile or pipeline of a kernel: its times, or why its results are wrong.

    width: one of `tile_table.WIDTHS`. pressure: "plain", "masked" or "rich". form: the tile; None for two_passes. ms:
    {case: milliseconds}; names of causal cases contain "causal". why: what is wrong, or "". A wrong form never runs.
    """

    kernel: str
    dtype: str
    width: int
    pressure: str
    form: Any
    ms: Mapping[str, float] = {}
    why: str = ""


class Forms(NamedTuple):
    """Measured tiles of a place. right: correct, fastest first. wrong: the others. best: times (`ms`) of right[0]."""

    right: tuple = ()
    wrong: tuple = ()
    best: Mapping[str, float] = {}


Choices = Mapping[tuple, Forms]  # {(kernel, dtype, width, register pressure): Forms}


def candidates(kernel, capability, itemsize, width, pressure="plain"):
    """Return the tiles, or the pipelines of a Hopper kernel, that `fusedattn tune` measures."""
    if kernel == "two_passes":
        return (None,)
    if kernel in tile_table.ON_HOPPER:
        supported = (capability, itemsize, pressure) == (90, 2, "plain")
        return tile_table.ON_HOPPER[kernel].get(width, ()) if supported else ()
    if kernel == "one_pass" and width > tile_table.ONE_PASS:
        return ()
    known = tile_table.tiles_for(kernel, capability, itemsize, width, pressure)
    if capability is not None and pressure == "plain":
        known += CANDIDATES.get((kernel, tile_table.architecture(capability), itemsize, row_width(width)), ())
    return tuple(map(tile_table.same, known))


def choose(rows: Iterable[Row]) -> Choices:
    """Return {(kernel, dtype, width, pressure): Forms}. Tiles that lack a time come last in Forms.right."""
    places: dict[tuple, list[Row]] = {}
    for row in rows:
        places.setdefault(row[:4], []).append(row)
    choices = {}
    for place, some in places.items():
        cases = {case for row in some for case in row.ms}
        ranked = sorted((x for x in some if not x.why), key=lambda x: sum(x.ms.get(case, math.inf) for case in cases))
        right, wrong = tuple(row.form for row in ranked), tuple(row.form for row in some if row.why)
        choices[place] = Forms(right, wrong, ranked[0].ms if ranked else {})
    return choices


def place(kernel: str, dtype: torch.dtype, width: int, pressure: str = "plain") -> tuple[str, str, int, str]:
    return kernel, str(dtype).removeprefix("torch."), row_width(width), pressure


def about(device: torch.device) -> dict[str, str]:
    """Return the GPU and the versions that a valid tuning file must name."""
    import triton
    from torch.utils.collect_env import get_nvidia_driver_version, run

    of, package = torch.cuda.get_device_properties(device), sys.modules[__name__.rpartition(".launch.")[0]]
    versions = dict(torch=str(torch.__version__), triton=triton.__version__, fusedattn=package.__version__)
    return dict(gpu=of.name, capability=f"{of.major}{of.minor}", driver=str(get_nvidia_driver_version(run))) | versions


def path(gpu: str) -> Path:
    """Return the tuning file of a GPU, in the user's cache folder (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    cache = named if os.path.isabs(named) else os.path.expanduser("~/.cache")
    return Path(cache) / "fusedattn" / "tuning" / (re.sub(r"\W+", "-", gpu).strip("-").lower() + ".json")


def read(file: Path, here: Collection[dict[str, str]]) -> tuple[str, Choices]:
    """Read (GPU, Choices) from a tuning file. Raise if it is damaged, or not from a machine in `here` ([]: any)."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        was = dict(content["about"])
        if here and was not in here:
            near = min(here, key=lambda one: len(one.items() - was.items()))  # the machine with the fewest differences
            differ = [f"{name!r}: {was.get(name)!r}, here {x!r}" for name, x in near.items() if x != was.get(name)]
            raise ValueError(", ".join(differ))
        return str(was["gpu"]), choose([_row(entry, int(was["capability"])) for entry in content["forms"]])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"of another machine or version, or damaged ({error!r})"
        raise ValueError(f"{file} is {why}: `fusedattn tune` writes a new one"[:700]) from error


def _row(entry, capability):
    row = Row(**{name: entry[name] for name in Row._fields})
    itemsize = getattr(torch, row.dtype).itemsize
    for known in candidates(row.kernel, capability, itemsize, row.width, row.pressure):
        if row.form == (known and known._asdict()):
            return row._replace(form=known, ms={case: float(row.ms[case]) for case in row.ms}, why=str(row.why))
    raise ValueError(f"there is no {row.form} of {row.kernel} for {row.dtype}, width {row.width}, {row.pressure} calls")


_used: dict[str, Choices] = {}  # {name of a GPU, or "" for every device: Choices}


@functools.cache
def of(device: Device) -> Choices:
    """Return the tuned Choices of a device. A CPU or an assumed GPU has none but those for every device."""
    if "" in _used:
        return _used[""]
    if device.type != "cuda" or isinstance(device, AssumedGPU) or not (_used or os.path.isdir(path("").parent)):
        return {}
    name = torch.cuda.get_device_name(device)
    if name in _used or not os.path.isfile(path(name)):
        return _used.get(name, {})
    try:
        return read(path(name), [about(device)])[1]
    except (OSError, ValueError) as error:
        warnings.warn(f"fusedattn ignores a tuning file: {error}", stacklevel=2)
        return {}


def use(choices: Choices, gpu: str = "") -> None:
    """Use these Choices in place of tuning files, on GPUs of a name, or by default on every device."""
    _used[gpu] = choices
    of.cache_clear()


def forget() -> None:
    _used.clear()
    of.cache_clear()


@constant
def _is_faster(device: Device, one: str, other: str, where: tuple, banded: bool) -> bool:
    first, second = (of(device).get((kernel, *where), Forms()).best for kernel in (one, other))
    cases = [case for case in first if case in second and ("causal" in case) == banded]
    return sum(first[case] for case in cases) < sum(second[case] for case in cases)


def is_faster(one: str, other: str, call: Call, device: Device, pressure: str = "plain") -> bool:
    _, *where = place(one, call.query.dtype, max(call.query.shape[3], call.value.shape[3]), pressure)
    return _is_faster(device, one, other, (*where,), call.left is not None or call.right is not None)


def prefers_hopper(kernel: str, call: Call, device: Device) -> bool:
    """Return whether a Hopper kernel is the default: no tuning file found one of its RIVALS faster."""
    return not any(is_faster(rival, kernel, call, device) for rival in RIVALS[kernel])
