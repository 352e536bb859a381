"""fusedattn tune: proves kernels on this GPU, times those that are right, and keeps what it found for calls to take."""

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import torch

from ...launch import tiles, tuned
from ...launch.tuned import PASSED, Candidate
from .. import machine
from ..bench import presets
from ..screen import Problem, Screen
from . import children, plan

MINUTES, QUICK_MINUTES = 5.0, 1.0
# What is proved and timed together, one after the other.
STEPS = (
    ("forward", "hopper"),
    ("dq", "dkdv", "one_pass", *tiles.BACKWARDS),
    ("two_passes",),
    tuned.OF_PEERS,
)
JOBS = 8  # processes that prove; each compiles, which keeps a core busy


class Search:
    """Candidates of one GPU and what became of them so far; `keep` is called after each answer."""

    def __init__(self, groups: Iterable[list[Candidate]], known: Sequence[Candidate], keep: Callable[[], None]):
        before = {(x.place, x.form): x for x in known}
        self.groups = [[before.get((x.place, x.form), x) for x in group] for group in groups]
        here = {(x.place, x.form) for group in self.groups for x in group}
        self.others = [x for x in known if (x.place, x.form) not in here]
        self.keep, self.lock = keep, threading.Lock()

    def tried(self) -> list[Candidate]:
        """All that is known, the results of earlier runs that this one does not ask for included."""
        return self.others + [x for group in self.groups for x in group if x.status != plan.WAITING]

    def run(self, children: Sequence, request: dict, cases: Callable, deadline: float, advance: Callable) -> bool:
        """Prove and time what was not yet; whether all of it was done before a deadline, of time.monotonic().

        A backward is proved with forwards that are known to be right, and two passes with the best of each.
        """
        for group, kernels in itertools.product(self.groups, STEPS):
            numbers = [n for n, x in enumerate(group) if x.kernel in kernels]
            peers = {n for n in numbers if group[n].kernel in tuned.OF_PEERS}  # which PyTorch has proved
            waiting = [n for n in numbers if group[n].status == plan.WAITING and n not in peers]

            def prove(child, group=group, waiting=waiting):
                while waiting and time.monotonic() < deadline:
                    self._ask(child, group, waiting.pop(0), request | dict(what="prove"), advance)

            _at_once(prove, children)
            for number in numbers:
                wanted = cases(group[number])
                fit = group[number].status in ((PASSED, plan.WAITING) if number in peers else (PASSED,))
                if not fit or set(wanted) <= set(group[number].ms):
                    continue
                if time.monotonic() >= deadline:
                    return False
                self._ask(children[0], group, number, request | dict(what="measure", cases=wanted), advance)
            if waiting:
                return False
        return True

    def _ask(self, child, group, number, request, advance):
        """Have a process try a candidate, and keep what became of it."""
        candidate = group[number]
        known = [tuned.entry(x) for x in self.tried()]
        answer = child.ask(request | dict(candidate=tuned.entry(candidate), known=known))
        status, why = answer["status"], answer["why"]
        if request["what"] == "measure" and status == tuned.UNKNOWN:
            status = candidate.status  # it is right, and no time is known of it
        with self.lock:
            group[number] = candidate._replace(status=status, why=why, ms=candidate.ms | answer["ms"])
            self.keep()
        advance(f"{request['what']} {named(candidate)}: {status}")


def _at_once(work, children):
    """work(child) of each, in threads; when one of them or this thread is interrupted all children are stopped."""
    with ThreadPoolExecutor(len(children)) as pool:
        try:
            for done in [pool.submit(work, child) for child in children]:
                done.result()
        except BaseException:
            for child in children:
                child.stop()
            raise


def named(candidate: Candidate) -> str:
    """A candidate in a few words."""
    form = candidate.form
    size = "" if form is None else f" {form.rows}x{form.keys}"
    if isinstance(form, tuned.Tile):
        size += f" w{form.warps} s{form.stages}" + " bulk" * form.bulk + " tma" * form.tma
    elif isinstance(form, tuned.Backward):
        size += f" s{form.stages}"
    elif form is not None:
        size += f" s{form.stages}" + " grid" * (not form.persistent) + " ping-pong" * form.ping_pong
    return f"{candidate.kernel}{size}, {candidate.dtype} {candidate.width} {candidate.load}"


def run(arguments) -> int:
    screen = Screen(arguments.json)
    machine.need_gpu("proves and times kernels on")
    device = torch.device("cuda", torch.cuda.current_device())
    about = tuned.about(device)
    file = tuned.path(about)
    if arguments.forget:
        for old in {file, *tuned.files(about["gpu"])}:  # those of other versions, too
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                raise Problem(f"forget: cannot remove {old}: {error}") from error
        screen.say(f"{file} is removed.")
        screen.finish(dict(file=str(file), candidates=[]))
        return 0
    known = _known(file, screen)
    if arguments.export is not None:
        if not known:
            raise Problem(f"export: there is nothing yet in {file}; run `fusedattn tune` first")
        try:
            shutil.copyfile(file, arguments.export)
        except OSError as error:
            raise Problem(f"export: cannot write {arguments.export}: {error}") from error
        screen.say(f"{file} is copied to {arguments.export}.")
    complete = True
    if not (arguments.show or arguments.export is not None):
        known, complete = _search(arguments, screen, device, about, file, known)
    _show(screen, known, file)
    wrong = [x for x in known if x.status != PASSED and x.kernel not in tuned.OF_PEERS]
    entries = [tuned.entry(x) for x in known]
    screen.finish(dict(file=str(file), about=about, complete=complete, wrong=len(wrong), candidates=entries))
    return 0 if known else 1


def _known(file: Path, screen: Screen) -> list[Candidate]:
    """The candidates of a file; none, with a word why, of one that is damaged."""
    try:
        return tuned.read(file)[1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        screen.say(f"{error}; it is begun again.")
        return []


def _taken(file: Path) -> IO:
    """A lock on a tuning file, until it is closed: of two that write one the last would drop what the other found."""
    import fcntl  # of Linux, as the kernels are

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_suffix(".lock").open("w")
    except OSError as error:
        raise Problem(f"cannot write {file}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise Problem(f"another `fusedattn tune` is writing {file}; wait until it has ended") from None
    return lock


def _search(arguments, screen, device, about, file, known):
    """(all that is known, whether everything was tried), after as many minutes as there are."""
    minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    deadline = time.monotonic() + 60 * minutes
    dtypes = arguments.dtype or (("bfloat16",) if arguments.quick else ("bfloat16", "float16"))
    loads = tuned.LOADS[:1] if arguments.quick else tuned.LOADS
    shapes = [presets.shape(text, False, dtypes[0]) for text in arguments.shape or ()]
    lengths = plan.LENGTHS[:1] if arguments.quick else plan.LENGTHS
    major, minor = torch.cuda.get_device_capability(device)
    widths = set(map(plan.width_of, shapes)) or plan.WIDTHS
    groups = plan.candidates(10 * major + minor, dtypes, loads, widths)
    search = Search(groups, known, lambda: tuned.write(file, about, search.tried()))
    waiting = sum(x.status == plan.WAITING for group in search.groups for x in group)
    screen.say(f"{waiting} candidates on {about['gpu']}, for {minutes:g} minutes; what is found is kept in {file}.")
    busy = _taken(file)
    some = [children.Child() for _ in range(max(1, min(JOBS, machine.cores() - 1)))]
    complete = False
    try:
        with screen.progress("candidates", 2 * waiting) as advance:
            request = dict(device=str(device), few=bool(arguments.quick))
            complete = search.run(some, request, lambda x: plan.cases(x, shapes, lengths), deadline, advance)
    except KeyboardInterrupt:
        screen.say("Stopped; the same command goes on from here.")
    except RuntimeError as error:
        raise Problem(str(error)) from error
    finally:
        for child in some:
            child.stop()
        busy.close()
    if not complete:
        screen.say("Not everything was tried: the same command goes on from here.")
    tuned.read_again()
    return search.tried(), complete


def _show(screen: Screen, known: Sequence[Candidate], file: Path) -> None:
    """The best of each place, what it takes, and what is wrong; then ours beside PyTorch's own."""
    everything, known = known, [x for x in known if x.kernel not in tuned.OF_PEERS]
    choices, rows = tuned.choose(known), []
    for place in dict.fromkeys(x.place for x in known):
        alike = [x for x in known if x.place == place]
        passed = [x for x in alike if x.status == PASSED]
        best = next((x for form in choices.right[place][:1] for x in passed if x.form == form), None)
        form = "none" if best is None else named(best).partition(",")[0].removeprefix(best.kernel).strip() or "taken"
        times = "" if best is None else ", ".join(f"{ms:.3f}" for ms in best.ms.values())
        rows.append([*place, form, times, f"{len(passed)} of {len(alike)}"])
    screen.table(str(file), ["kernel", "dtype", "width", "calls", "best", "ms", "right"], rows)
    for x in known:
        if x.status != PASSED:
            screen.say(f"{x.status}: {named(x)}: {x.why}", style="red")
    if beside := list(_beside(everything)):
        screen.table("Beside PyTorch's own", ["dtype", "case", "", "ours, ms", "its best, ms", "", "faster"], beside)


def _beside(known: Sequence[Candidate]) -> Iterator[list]:
    """Of each case that both were timed on a row of our best time, of that of PyTorch's backends, and their ratio."""
    ours = dict.fromkeys(("forward", "hopper"), "forward")
    ours |= dict.fromkeys(("one_pass", "two_passes", *tiles.BACKWARDS), "backward")
    timed: dict[tuple, dict[str, tuple[float, str]]] = {}
    for x in (x for x in known if x.status == PASSED):
        peer, _, mode = x.kernel.partition(" ")
        mode = mode or ours.get(x.kernel, "")
        for case, ms in x.ms.items() if mode else ():
            best = timed.setdefault((x.dtype, case, mode), {})
            side = "its" if x.kernel in tuned.OF_PEERS else "ours"
            best[side] = min(best.get(side, (ms, peer)), (ms, peer))
    for (dtype, case, mode), best in timed.items():
        if len(best) == 2:
            (mine, _), (its, peer) = best["ours"], best["its"]
            yield [dtype, case, mode, mine, its, peer, f"{its / mine:.2f}x"]
