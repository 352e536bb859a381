"""Is a tiny call as quick as torch's own, with all that the host does for it?    python -m fusedattn.bench.small

wall is what the caller of a forward waits for on average, host and all, when call follows call; graph is the same
forward in a CUDA graph, where the host does nothing; wall_forward_backward is a call with its gradients. Beside them
"sdpa" is torch's attention as it comes, with the backend that it chooses.
"""

import sys

from . import providers, table
from .attention import CLOCKS, Question, main

GOALS = {"wall": 1.2, "graph": 1.0}  # our time over that of "sdpa"


def _providers(device):
    """FlexAttention is compiled for each shape, and a long while; fusedattn:naive is for long calls."""
    return ["sdpa", *(name for name in providers.usual(device) if name not in ("flex", "fusedattn:naive"))]


def times(written):
    """{(mode, case): {provider: row}} of what the last run timed and found right."""
    found = {}
    for row in table.last_run(written):
        if row.mode in CLOCKS and row.ms_p50 != "" and row.status != "wrong":
            found.setdefault((row.mode, table.case_of(row)), {})[row.provider] = row
    return found


def text(written):
    """Microseconds of each provider, a line a case and mode, and whether the goals are met."""
    lines, over = [], {mode: {} for mode in GOALS}
    for (mode, case), found in times(written).items():
        mine, peer = table.ours(found.values()), found.get("sdpa")
        said = "  ".join(f"{name} {1e3 * row.ms_p50:.2f}" for name, row in found.items())
        lines.append(f"{case.name} {mode}, us: {said}")
        if mine and peer and mode in GOALS:
            over[mode][case] = mine.ms_p50 / peer.ms_p50
    for mode, goal in GOALS.items():
        if not over[mode]:
            lines.append(f"goal {mode} <= {goal} of torch's own: not measured")
            continue
        worst = max(over[mode], key=over[mode].get)
        met = sum(ratio <= goal for ratio in over[mode].values())
        lines.append(
            f"goal {mode} <= {goal} of torch's own: met in {met} of {len(over[mode])} cases, "
            f"worst {over[mode][worst]:.2f} ({worst.name})"
        )
    return "\n".join(lines)


QUESTION = Question(__doc__, tuple(CLOCKS), "small", "tiny-small", text, _providers)

if __name__ == "__main__":
    sys.exit(main(question=QUESTION))
