"""Forms of one of our kernels side by side, with ours as it comes and the peers: the standings, and the goals."""

import os
import pathlib
import re
import statistics

from fusedattn.bench import providers, report, rows
from fusedattn.bench.report import Goal, over

OURS = "fusedattn:triton"  # as it comes
HOPPER, FORWARD, BACKWARD = providers.PIPELINE, providers.FORWARD, providers.BACKWARD


def names(prefix):
    """The forms of a kernel, ours as it comes, and the peers: where one cannot run, a row says so."""
    return [*providers.forms(prefix=prefix), OURS, *providers.usual("cuda", "fusedattn", "naive", "sdpa:math")]


def lines(prefix, written):
    """The goals by the first form of each width, and the standings of all forms in it."""
    last = rows.last_run(written)
    out, first = failed(last, prefix), winners(last, prefix)
    yield from (goal.line([row for row in last if _stands(row, prefix, first)]) for goal in GOALS[prefix])
    for dim in sorted({row.D for row in last}):
        for name, causal in (("", (0, 1)), (" full", (0,)), (" causal", (1,))):
            some = [row for row in last if row.D == dim and row.causal in causal]
            speeds, count = standings(some, prefix, out)
            each = ", ".join(f"{form} {speed:.3f}" for form, speed in speeds.items())
            yield from [f"d{dim}{name}: {each} of the fastest, in {report.count(count, 'cell')}"] * bool(speeds)
    if out:
        yield f"failed or refused in some cell, so out of the standings: {', '.join(sorted(out))}"
    yield from (f"first of d{dim}: {form}" for dim, form in first.items())


def _stands(row, prefix, first):
    """Whether a row counts for a goal: one of a form does, if it is the first of its width."""
    return not row.provider.startswith(prefix) or row.provider == f"{prefix}{first.get(row.D)}"


def failed(last, prefix):
    """The forms that some cell has no time of, or a wrong result."""
    return {row.provider.removeprefix(prefix) for row in last if row.provider.startswith(prefix) and row.status != "ok"}


def standings(some, prefix, out=()):
    """({form: its speed over that of the fastest}, best first; in how many cells) of rows, less those that are out.

    It is the geometric mean over the cells in which all were timed.
    """
    cells = []
    for group in report.groups(some).values():
        timed = {row.provider.removeprefix(prefix): row for row in group if row.provider.startswith(prefix)}
        cells.append({form: row.ms_p50 for form, row in timed.items() if row.status == "ok" and form not in out})
    forms = dict.fromkeys(form for cell in cells for form in cell)
    shared = [cell for cell in cells if forms and forms.keys() <= cell.keys()]
    speeds = {
        form: statistics.geometric_mean(min(cell.values()) / cell[form] for cell in shared) for form in forms if shared
    }
    return dict(sorted(speeds.items(), key=lambda item: -item[1])), len(shared)


def winners(last, prefix):
    """{D: the form that stands first there, of those that never failed}."""
    out = failed(last, prefix)
    every = {dim: standings([row for row in last if row.D == dim], prefix, out)[0] for dim in {row.D for row in last}}
    return {dim: next(iter(speeds)) for dim, speeds in sorted(every.items()) if speeds}


def proven(names, path):
    """The providers of these names whose form, if they are one, is in names of tests that all passed.

    path: of what `pytest -v` printed, where a test that began and has no outcome did not pass; without, no form did.
    """
    printed = pathlib.Path(path).read_text() if os.path.exists(path) else ""
    outcomes, passed, others = {}, set(), set()
    for among, test, alone in re.findall(OUTCOME, printed, re.M):
        outcomes[test] = among or alone or outcomes.get(test)
    for test, outcome in outcomes.items():
        (passed if outcome == "PASSED" else others).update(test.partition("[")[2].rstrip("]").split("-"))
    return [name for name in names if name not in providers.forms() or name.partition("/")[2] in passed - others]


# A test as it begins, and with its outcome: before it with pytest-xdist, or after it.
OUTCOME = r"^(?:\[gw\d+\] \[ *\d+%\] ([A-Z]+) )?(\S+::.*?)(?: +([A-Z]+)(?: \(.*\))? +\[ *\d+%\])? *$"
SHORT = 1024  # tokens up to which the goal of the kernel for Hopper is another one


def _goal(said, ask, mine, dim=None, causal=None, lengths=range(1 << 20), peers=(), mode="forward"):
    def where(case):
        return dim in (None, case.D) and causal in (None, case.causal) and case.Sq in lengths

    return Goal(said, ask, over(*peers, mine=mine), mode, where)


def _backward(said, ask, *where, **peers):
    return _goal(f"backward {said}", ask, f"{BACKWARD}*", *where, mode="backward", **peers)


# Speeds over the best peer's; {D: full, causal}.
_LONG = {64: (1.15, 1.15), 128: (0.95, 1.0), 256: (1.5, 1.5)}
_KINDS = ((False, "full"), (True, "causal"))
GOALS = {
    HOPPER: [
        *(
            _goal(f"hopper d{dim} {kind} S > {SHORT}", asks[c], f"{HOPPER}*", dim, c, range(SHORT + 1, 1 << 20))
            for dim, asks in _LONG.items()
            for c, kind in _KINDS
        ),
        _goal(f"hopper S <= {SHORT}", 0.95, f"{HOPPER}*", lengths=range(SHORT + 1)),
        _goal("hopper everywhere", 0.85, f"{HOPPER}*"),
        *(_goal(f"universal d{dim}", ask, OURS, dim) for dim, ask in ((128, 0.80), (64, 0.95))),
    ],
    FORWARD: [_goal(f"forward d{d} {kind}", _LONG[d][c], f"{FORWARD}*", d, c) for d in _LONG for c, kind in _KINDS],
    BACKWARD: [
        *(
            _backward(f"d{d} {kind}", ask, d, c)
            for d, ask in ((128, 0.85), (64, 1.0), (256, 1.2))
            for c, kind in _KINDS
        ),
        _backward("everywhere", 0.7),
        _backward("over FlexAttention everywhere", 1.3, peers=("flex",)),
    ],
}
