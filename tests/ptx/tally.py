"""Counts what became of mutants, in words and as a table."""

import pathlib
from collections import Counter

import triton

REPORT = pathlib.Path(__file__).parents[2] / "bench" / "results" / "mutants.md"
_RESULTS = "seen", "equivalent", "survived"


def line(verdict):
    """A Verdict in a line."""
    mutant = verdict.mutant
    where = f"sm_{verdict.capability} {verdict.kernel:8} {mutant.mutation.name:24} line {mutant.line:5}"
    return f"{where} {mutant.text[:44]:44} {mutant.part:9}{mutant.source[:60]:60} {verdict.result}: {verdict.why}"


def share(verdicts):
    """Which part is seen of those that are not equivalent."""
    counts = Counter(each.result for each in verdicts)
    return counts["seen"] / max(1, counts["seen"] + counts["survived"])


def _counted(verdicts, key):
    """{key of a Verdict: its count of each result}, in the order in which they came."""
    counts = {}
    for each in verdicts:
        counts.setdefault(key(each), Counter())[each.result] += 1
    return counts


def summary(verdicts):
    """The counts of each kind, the equivalent ones by reason, and the share that is seen."""
    text = [
        f"{kind}: " + ", ".join(f"{count[result]} {result}" for result in _RESULTS)
        for kind, count in _counted(verdicts, lambda each: each.mutant.mutation.kind).items()
    ]
    reasons = Counter(each.why for each in verdicts if each.result == "equivalent")
    text += [f"{count} equivalent: {why}" for why, count in reasons.most_common()]
    return "\n".join([*text, f"{share(verdicts):.1%} of those not equivalent are seen"])


def _row(*cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(*names):
    return ["", _row(*names), "|" + "---|" * len(names)]


def write(verdicts, arguments):
    """Write the table."""
    text = [
        "# Compiled code that is broken on purpose",
        "",
        f"Made by `python -m tests.ptx.mutants {' '.join(arguments)}` with Triton {triton.__version__}:",
        "the PTX of a kernel is broken in one place, and executed in calls at the edges until one of them shows it.",
        f"Of the mutants that are not equivalent {share(verdicts):.1%} are seen.",
    ]
    kinds = _counted(verdicts, lambda each: (each.kernel, f"sm_{each.capability}", each.mutant.mutation.kind))
    text += _table("kernel", "GPU", "kind", *_RESULTS)
    text += [_row(*key, *(count[result] for result in _RESULTS)) for key, count in kinds.items()]
    for result, title in (("equivalent", "Equivalent, and why"), ("survived", "Survived")):
        found = [each for each in verdicts if each.result == result]
        text += ["", f"## {title}", *_table("kernel", "GPU", "mutation", "compiled from", "number", "why")]
        places = _counted(found, _place)
        text += [_row(*key[:4], count[result], key[4]) for key, count in sorted(places.items())]
    REPORT.write_text("\n".join(text) + "\n")


def _place(verdict):
    mutant = verdict.mutant
    source = f"`{mutant.source}`".replace("|", "\\|")
    return verdict.kernel, f"sm_{verdict.capability}", mutant.mutation.name, source, verdict.why
