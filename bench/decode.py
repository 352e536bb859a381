"""Is one more token bound by the bytes of its cache, and by nothing else?    python -m fusedattn.bench.decode

One query of each sequence to a full cache: fa.attention_decode, in one piece and in shuffled pages, beside torch's
attention to the same keys. forward is with cold caches; graph is in a CUDA graph, warm, where the host does nothing.
What is moved are the bytes of query, keys, values and output, whoever moves them.
"""

import sys

from . import cost, providers, table
from .attention import Question, main

LARGE = 256e6  # bytes of keys and values from which the first two goals speak
SHARE, RATIO, SHORT_US = 0.85, 1.1, 8.0  # of a copy's speed; of flash's; microseconds of one sequence of 1024 keys
OURS, PEER = "fusedattn:cache", "sdpa:flash"
FIRST = (OURS, PEER)
PAGED = ("fusedattn:pages=256", "fusedattn:pages=16")


def _providers(device):
    """FlexAttention is compiled for each shape; who computes all scores of all heads is no peer."""
    left_out = ("flex", "naive", "sdpa:math", "fusedattn:naive")
    peers = [name for name in providers.usual(device) if name not in left_out]
    return [OURS, *(name for name in peers if name != "fusedattn"), *PAGED, *(["naive"] if device == "cpu" else [])]


def _tier(case, name):
    return 0 if name in FIRST else 2 if name in PAGED else 1


def timed(written):
    """{(mode, case): {provider: row}} of what the last run timed and found right."""
    found = {}
    for row in table.last_run(written):
        if row.ms_p50 != "" and row.status != "wrong":
            found.setdefault((row.mode, table.case_of(row)), {})[row.provider] = row
    return found


def text(written):
    """A line a case and mode: time and share of a copy's speed of each provider; then the goals."""
    lines, shares, ratios, short = [], {}, {}, {}
    for (mode, case), found in timed(written).items():
        said = "  ".join(f"{name} {1e3 * row.ms_p50:.1f}{_percent(row)}" for name, row in found.items())
        lines.append(f"{case.name} {mode}, us: {said}")
        mine, peer = found.get(OURS), found.get(PEER)
        if mode == "forward" and mine and cost.given(case) >= LARGE:
            shares[case.name] = table.shares(mine)[1]
            if peer:
                ratios[case.name] = peer.ms_p50 / mine.ms_p50
        if mode == "graph" and mine and (case.B, case.Sk) == (1, 1024):
            short[case.name] = 1e3 * mine.ms_p50
    lines.append(_goal(f"{SHARE:.0%} of a copy's speed from {LARGE / 1e6:.0f} MB on", shares, min, SHARE))
    lines.append(_goal(f"{RATIO} times {PEER} from {LARGE / 1e6:.0f} MB on", ratios, min, RATIO))
    lines.append(_goal(f"{SHORT_US:g} us for one sequence of 1024 keys in a graph", short, max, SHORT_US))
    return "\n".join(lines)


def _percent(row):
    share = table.shares(row)[1]
    return "" if share is None else f" ({share:.0%})"


def _goal(said, found, worst, goal):
    found = {name: value for name, value in found.items() if value is not None}
    if not found:
        return f"goal {said}: not measured"
    last = worst(found, key=found.get)
    met = sum(worst(value, goal) == goal for value in found.values())
    return f"goal {said}: met in {met} of {len(found)} cases, worst {found[last]:.3g} ({last})"


QUESTION = Question(__doc__, ("forward", "graph"), "decode", "tiny-decode", text, _providers, _tier)

if __name__ == "__main__":
    sys.exit(main(question=QUESTION))
