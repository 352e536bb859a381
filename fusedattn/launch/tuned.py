"""What was found out on this machine: which tiles and pipelines gave right numbers, and which of them are the fastest.

A file has the candidates of one GPU. It counts where GPU, driver, torch, Triton and our kernels are what they were when
it was written, and is read once, at the first call on that GPU. Without one the first rows of `launch.tiles` count.
"""

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..call.form import Call, Device
from ..private import constant
from . import tiles
from .tiles import ONE_PASS, Backward, Pipeline, Tile, row_width, same

FORMAT = 1
ABOUT = ("gpu", "capability", "driver", "torch", "triton", "fusedattn")  # what a file says that it is about
PASSED = "passed"
UNFIT, UNKNOWN = "does not fit", "unknown"  # what needs more than this GPU has, and what nothing is known of: not wrong
KERNELS = ("forward", "dq", "dkdv", "one_pass")
PEERS = ("sdpa:cudnn", "sdpa:flash", "sdpa:efficient")  # PyTorch's own, which ours stand beside
MODES = ("forward", "backward")
OF_PEERS = tuple(f"{peer} {mode}" for peer in PEERS for mode in MODES)
FORMS: Mapping[str, type | None] = {
    **dict.fromkeys(KERNELS, Tile),
    "hopper": Pipeline,
    **dict.fromkeys(tiles.BACKWARDS, Backward),
    "two_passes": None,
    **dict.fromkeys(OF_PEERS),
}
DTYPES = ("bfloat16", "float16", "float32")
SLOWER = "the tuning file of this GPU found it slower, so it runs only when named"  # why a kernel for Hopper waits
LOADS = ("plain", "masked", "rich")

# What the best of each kernel for Hopper has to be faster than; of the ordered backward only what gives the same bits.
RIVALS = {"hopper": ("forward",)} | {
    name: ("two_passes",) if name in tiles.REPEATABLE else ("one_pass", "two_passes") for name in tiles.BACKWARDS
}


class Candidate(NamedTuple):
    """One way to compute a pass, and what became of it.

    kernel: of FORMS, which says what its form is; two_passes are the dq and dkdv that were found best, and have none,
    like what is timed beside ours, a backend of PyTorch's own in one of MODES, of which nothing is chosen.
    width: of the wider of D and Dv, 64, 128 or 256. load: of the calls, as `launch.tiles.tiles` has it.
    status: PASSED, or what kept it from that; why: a sentence then.
    ms: {case: milliseconds}, of its forward, or of the gradients that it makes; a causal one's name ends in "causal".
    """

    kernel: str
    dtype: str
    width: int
    load: str
    form: Tile | Pipeline | Backward | None
    status: str = PASSED
    why: str = ""
    ms: dict[str, float] = {}

    @property
    def place(self) -> tuple[str, str, int, str]:
        """What it stands for with others."""
        return self.kernel, self.dtype, self.width, self.load


class Choices(NamedTuple):
    """What the candidates of a file choose; without any, nothing. Places are those of `Candidate`.

    right, wrong: {place: forms}, the fastest first. slower: (kernel for Hopper, dtype, width, banded) of plain calls
    that a universal kernel computes faster. two_passes: (dtype, width, load) of calls whose backward is faster in two
    passes, or right in these alone. adding: (dtype, width, banded) of plain calls whose backward for Hopper is faster
    when it adds to dq than when it stores gradients of scores. banded: causal or windowed.
    """

    right: Mapping[tuple, tuple]
    wrong: Mapping[tuple, tuple]
    slower: frozenset[tuple[str, str, int, bool]] = frozenset()
    two_passes: frozenset[tuple[str, int, str]] = frozenset()
    adding: frozenset[tuple[str, int, bool]] = frozenset()

    def tiles(self, place: tuple, table: tuple[Tile, ...]) -> tuple[Tile, ...]:
        """Tiles to try: those found right, the fastest first; then a table's that are not known to be wrong."""
        first, wrong = self.right.get(place, ()), self.wrong.get(place, ())
        return (*first, *(tile for tile in table if same(tile) not in (*first, *wrong)))


NOTHING = Choices({}, {})


def place(kernel: str, dtype: torch.dtype, width: int, load: str = "plain") -> tuple[str, str, int, str]:
    """The place of the candidates that a call has for a kernel; width: of the wider of D and Dv."""
    return kernel, str(dtype).removeprefix("torch."), row_width(width), load


def choose(candidates: Iterable[Candidate]) -> Choices:
    """What candidates choose: of each place those that passed, by their times; one that lacks a time comes last."""
    places: dict[tuple, list[Candidate]] = {}
    for candidate in candidates:
        places.setdefault(candidate.place, []).append(candidate)

    def ranked(place):
        return sorted((x for x in places.get(place, ()) if x.status == PASSED), key=lambda x: _time(x, places[place]))

    right = {place: tuple(same(x.form) for x in ranked(place)) for place in places}
    fine = PASSED, UNFIT, UNKNOWN
    wrong = {place: tuple(same(x.form) for x in some if x.status not in fine) for place, some in places.items()}
    wrong = {place: forms for place, forms in wrong.items() if forms}
    slower, two_passes, adding = set(), set(), set()
    for _, *where in places:
        dtype, width, load = where
        for kernel, others in RIVALS.items():
            special = ranked((kernel, *where))[:1]
            rivals = [x for other in others for x in ranked((other, *where))[:1]]
            for causal in (False, True) if special else ():
                if any(_is_faster(rival, special[0], causal) for rival in rivals):
                    slower.add((kernel, dtype, width, causal))
        by_scores, adds = ranked(("hopper_stored", *where))[:1], ranked(("hopper_bwd_256", *where))[:1]
        for causal in (False, True) if by_scores and adds else ():
            if _is_faster(adds[0], by_scores[0], causal):
                adding.add((dtype, width, causal))
        one, two = ranked(("one_pass", *where))[:1], ranked(("two_passes", *where))[:1]
        no_other = not one and wrong.get(("one_pass", *where))
        if no_other or (one and two and _is_faster(two[0], one[0])):
            two_passes.add((dtype, width, load))
    return Choices(right, wrong, frozenset(slower), frozenset(two_passes), frozenset(adding))


def _time(candidate, alike):
    """Milliseconds of all cases in which one like it was timed; infinite if it was not timed in each."""
    cases = set().union(*(x.ms for x in alike))
    return sum(candidate.ms.values()) if cases and cases == set(candidate.ms) else float("inf")


def _is_faster(one, other, causal=None):
    """Whether one takes less time in the cases of both, causal ones, others, or all of them; False without any."""
    both = [case for case in one.ms if case in other.ms and causal in (None, case.endswith("causal"))]
    return sum(one.ms[case] for case in both) < sum(other.ms[case] for case in both)


def about(device: torch.device) -> dict[str, str]:
    """What a file must be of, to count on a GPU."""
    import triton

    of = torch.cuda.get_device_properties(device)
    found = dict(gpu=of.name, capability=f"{of.major}.{of.minor}", driver=driver(), torch=str(torch.__version__))
    return found | dict(triton=triton.__version__, fusedattn=_version())


@functools.cache
def driver() -> str:
    """The version of NVIDIA's driver, "" if nobody says it."""
    try:
        found = re.search(r"Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    if found is not None:
        return found[1]
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (subprocess.run(command, capture_output=True, text=True, check=False).stdout.split() or [""])[0]


@functools.cache
def _version():
    """Our version, and a digest of the kernels: what was proved of some is not of others."""
    from .. import kernels

    package = sys.modules[__name__.rpartition(".launch.")[0]]  # this copy, whatever its name is
    where = Path(kernels.__path__[0])
    texts = [(str(path.relative_to(where)), path.read_bytes()) for path in sorted(where.rglob("*.py"))]
    return f"{package.__version__}+{hashlib.sha256(repr(texts).encode()).hexdigest()[:12]}"


def folder() -> Path:
    """Where files are: in the user's cache, as the XDG Base Directory Specification has it."""
    named = os.environ.get("XDG_CACHE_HOME", "")  # one that is not absolute is to be ignored
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "fusedattn" / "tuning"


def files(gpu: str) -> list[Path]:
    """What there is of a GPU by name, of whatever versions."""
    return sorted(folder().glob(f"{_slug(gpu)}-{'[0-9a-f]' * 12}.json"))


def path(of: Mapping[str, str]) -> Path:
    """The file of what `about` says."""
    digest = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"{_slug(of['gpu'])}-{digest}.json"


def _slug(gpu):
    return re.sub(r"\W+", "-", gpu).strip("-").lower()


def read(file: Path) -> tuple[dict[str, str], list[Candidate]]:
    """(what a file is about, its candidates). Raises: OSError; ValueError, whose message names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if type(content) is not dict:
            raise ValueError("it is no JSON object")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this version reads {FORMAT}")
        of = {name: str(content["about"][name]) for name in ABOUT}
        return of, [candidate_of(entry) for entry in content["candidates"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        cause = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file} is no tuning file of fusedattn, or a damaged one: {cause}") from error


def entry(candidate: Candidate) -> dict[str, Any]:
    """A Candidate as JSON has it."""
    return candidate._asdict() | dict(form=None if candidate.form is None else candidate.form._asdict())


def candidate_of(entry: dict[str, Any]) -> Candidate:
    """The Candidate of what `entry` gave; KeyError, TypeError or ValueError for what is none."""
    kernel, dtype, width, load, form, status, why, ms = (entry[name] for name in Candidate._fields)
    kind = FORMS[kernel]
    loads = LOADS if kernel not in tiles.ON_HOPPER else LOADS[:1]
    known = dtype in DTYPES and type(width) is int and width in tiles.HOPPER and load in loads
    if (
        not known
        or (kernel == "one_pass" and width > ONE_PASS)
        or width not in tiles.ON_HOPPER.get(kernel, tiles.HOPPER)
    ):
        raise ValueError(f"there is no {kernel} of {dtype}, width {width} and {load} calls")
    taken = None if kind is None else kind(**form)
    if taken is not None and not _is_one(kernel, taken, width):
        raise ValueError(f"there is no form {form} of {kernel} at width {width}")
    times = {str(case): float(time) for case, time in ms.items()}
    if not all(0 < time < float("inf") for time in times.values()):
        raise ValueError(f"{kernel} has a time that is none")
    return Candidate(kernel, dtype, width, load, taken, str(status), str(why), times)


def _is_one(kernel, form, width):
    """Whether a kernel can take a form: what a person, or a damaged disk, wrote into a file may be anything."""
    if kernel in tiles.ON_HOPPER:
        return form in tiles.ON_HOPPER[kernel].get(width, ())
    powers = all(type(x) is int and 0 < x <= 1024 and x & (x - 1) == 0 for x in (form.rows, form.keys, form.warps))
    flags, stages = {type(form.bulk), type(form.tma)} == {bool}, type(form.stages) is int and 1 <= form.stages <= 8
    return powers and flags and stages


def write(file: Path, of: Mapping[str, str], candidates: Iterable[Candidate]) -> None:
    """Write a file whole, or leave the one before; a reader never sees a part of it."""
    content = dict(format=FORMAT, about=dict(of), host=platform.node(), candidates=[*map(entry, candidates)])
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


_asked: Choices | None = None
_loaded: dict[str, Choices] = {}  # {name of a GPU: Choices} of `load`


@functools.cache
def _found(device):
    """The Choices of a GPU, from a file that was loaded or that lies in the folder."""
    try:
        if not (_loaded or folder().is_dir()):
            return NOTHING
    except (OSError, RuntimeError):  # a home that nobody may look into, or none at all
        return NOTHING
    name = torch.cuda.get_device_name(device)
    if name in _loaded:
        return _loaded[name]
    others = files(name)
    if not others:
        return NOTHING
    of = about(device)
    file = path(of)
    try:
        was, candidates = read(file)
        if was != of:
            raise ValueError(f"{file} is of another machine or version: {_difference(was, of)}")
    except FileNotFoundError:
        _warn(f"{others[0]} is of other versions, or of another driver, than what runs here")
    except (OSError, ValueError) as error:
        _warn(str(error))
    else:
        return choose(candidates)
    return NOTHING


def _difference(was, of):
    """What two answers of `about` differ in."""
    names = [name for name in {**of, **was} if was.get(name) != of.get(name)]
    return ", ".join(f"{name} {was.get(name)} and not {of.get(name)}" for name in names)


def _warn(why):
    warnings.warn(f"fusedattn ignores a tuning file: {why}", stacklevel=2)


def of(device: Device) -> Choices:
    """Return the Choices of a device: none for a CPU or an assumed GPU, unless `ask` has set some."""
    if _asked is not None:
        return _asked
    return _found(device) if device.type == "cuda" and isinstance(device, torch.device) else NOTHING


def ask(choices: Choices | None) -> None:
    """Have these choices count in this process, on any device and whatever files there are; None undoes it."""
    global _asked
    _asked = choices
    tiles.fitting.clear()


@constant
def _is_among(kind: str, device: Device, kernel: tuple, dtype: torch.dtype, width: int, banded: bool) -> bool:
    return (*kernel, str(dtype).removeprefix("torch."), width, banded) in getattr(of(device), kind)


def _says(kind: str, call: Call, device: Device, *kernel: str) -> bool:
    """Return whether a set of Choices has calls like this one, by a kernel where the set has kernels."""
    width = row_width(max(call.query.shape[3], call.value.shape[3]))
    banded = call.left is not None or call.right is not None
    return _is_among(kind, device, kernel, call.query.dtype, width, banded)


def prefers_hopper(kernel: str, call: Call, device: Device) -> bool:
    """Return whether a kernel for Hopper takes a call that names no backend: no tuning file found it slower."""
    return not _says("slower", call, device, kernel)


def prefers_stored(call: Call, device: Device) -> bool:
    """Return whether the backward that stores gradients of scores comes before the one that adds to dq."""
    return not _says("adding", call, device)


def load(file: Path) -> None:
    """Have a file count on the GPUs that it is about; `fusedattn.tuning.load` says more."""
    was, candidates = read(file)
    if torch.cuda.is_available():
        here = [about(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        if was not in here:
            raise ValueError(f"{file} is of another machine or version: {_difference(was, here[0])}")
    _loaded[was["gpu"]] = choose(candidates)
    read_again()


def unload() -> None:
    """Undo every `load`, and read files again at the next call."""
    _loaded.clear()
    read_again()


def read_again() -> None:
    """Read files again at the next call."""
    _found.cache_clear()
    tiles.fitting.clear()
