"""Forms of one of our kernels side by side, with ours as it comes and the peers: the standings, and the goals."""

import os
import statistics
import xml.etree.ElementTree
from collections.abc import Callable
from typing import NamedTuple

from fusedattn.bench import providers, report, rows
from fusedattn.bench.report import Goal

OTHER = "fusedattn:triton"  # ours as it comes


class Board(NamedTuple):
    """prefix: of the providers that are forms. goals: function of {D: the pattern of its first form}."""

    prefix: str
    goals: Callable

    def providers(self, device):
        """The forms, ours as it comes, and the peers: where one cannot run, a row says so."""
        peers = [name for name in providers.usual("cuda") if not name.startswith(("fusedattn", "naive", "sdpa:math"))]
        return [*(self.prefix + form for form in providers.FORMS[self.prefix]()), OTHER, *peers]

    def text(self, written):
        """The report of rows: the standings of the forms in a width, and the goals by the first one there."""
        last = rows.last_run(written)
        dims, out, lines = sorted({row.D for row in last}), failed(last, self.prefix), []
        for dim in dims:
            for name, causal in (("", (0, 1)), (" full", (0,)), (" causal", (1,))):
                some = [row for row in last if row.D == dim and row.causal in causal]
                speeds, count = standings(some, self.prefix, out)
                each = ", ".join(f"{form} {speed:.3f}" for form, speed in speeds.items())
                lines += [f"d{dim}{name}: {each} of the fastest, in {report.count(count, 'cell')}"] * bool(speeds)
        if out:
            lines.append(f"failed or refused in some cell, so out of the standings: {', '.join(sorted(out))}")
        first = winners(last, self.prefix)
        lines += [f"first of d{dim}: {form}" for dim, form in first.items()]
        return report.text(written, self.goals({dim: self.prefix + form for dim, form in first.items()}), lines)


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
    out, first = failed(last, prefix), {}
    for dim in sorted({row.D for row in last}):
        speeds, _ = standings([row for row in last if row.D == dim], prefix, out)
        first |= dict.fromkeys([dim] * bool(speeds), next(iter(speeds), None))
    return first


def proven(names, path):
    """The providers of these names whose form, if they are one, is in names of tests that all passed.

    path: a file of pytest's --junitxml; where there is none, no form is proven.
    """
    passed, others = set(), set()
    if os.path.exists(path):
        for test in xml.etree.ElementTree.parse(path).iter("testcase"):
            words = test.get("name", "").partition("[")[2].rstrip("]").split("-")
            (passed if len(test) == 0 else others).update(words)  # a child is a failure, an error or a skip
    forms = {prefix + form: form for prefix, make in providers.FORMS.items() for form in make()}
    return [name for name in names if name not in forms or forms[name] in passed - others]


# Speeds over the best peer's. The kernel for Hopper: {D: full, causal} over SHORT tokens, up to so many, anywhere.
OF_HOPPER = {64: (1.15, 1.15), 128: (0.95, 1.0), 256: (1.5, 1.5)}
SHORT, OF_SHORT, FLOOR = 1024, 0.95, 0.85
OF_UNIVERSAL = {128: 0.80, 64: 0.95}  # the universal kernel
OF_BACKWARD, OF_FLEX, FLOOR_BACKWARD = {128: 0.85, 64: 1.0, 256: 1.2}, 1.3, 0.7
KINDS = ("full", "causal")


def _first(forms, *peers):
    """The value of a Goal: the speed of the first form of a case's width over that of the fastest peer."""

    def value(case, some):
        mine = report.fastest(some, forms[case.D]) if case.D in forms else None
        other = report.fastest([row for row in some if not report.is_ours(row)], *peers)
        return None if mine is None or other is None else other.ms_p50 / mine.ms_p50

    return value


def _is(dim, causal=None, over=0):
    return lambda case: case.D == dim and causal in (None, case.causal) and case.Sq > over


def _hopper_goals(forms):
    value, universal = _first(forms), _first(dict.fromkeys(OF_HOPPER, OTHER))
    for dim, asked in OF_HOPPER.items():
        for causal, ask in enumerate(asked):
            where = _is(dim, bool(causal), SHORT)
            yield Goal(f"hopper d{dim} {KINDS[causal]} S > {SHORT}", ask, value, "forward", where)
    yield Goal(f"hopper S <= {SHORT}", OF_SHORT, value, "forward", lambda case: case.Sq <= SHORT)
    yield Goal("hopper everywhere", FLOOR, value, "forward")
    for dim, ask in OF_UNIVERSAL.items():
        yield Goal(f"universal d{dim}", ask, universal, "forward", _is(dim))


def _backward_goals(forms):
    value = _first(forms)
    for dim, ask in OF_BACKWARD.items():
        for causal, name in enumerate(KINDS):
            yield Goal(f"backward d{dim} {name}", ask, value, "backward", _is(dim, bool(causal)))
    yield Goal("backward everywhere", FLOOR_BACKWARD, value, "backward")
    yield Goal("backward over FlexAttention everywhere", OF_FLEX, _first(forms, "flex"), "backward")


HOPPER = Board(providers.PIPELINE, lambda forms: list(_hopper_goals(forms)))
BACKWARD = Board(providers.BACKWARD, lambda forms: list(_backward_goals(forms)))
