"""Plots of speed over length from the rows of a CSV: python -m fusedattn.bench.plot FILE.csv FILE.png [PROVIDER ...].

With PROVIDERs it draws the cases in PAPER, each from the last run that timed all these providers; otherwise the last
row of each provider, mode and case. It needs matplotlib.
"""

import collections
import math
import sys
import textwrap

from . import rows
from .cases import DTYPES
from .report import is_ours, kind, last_runs

MARKERS = "os^DvP<X>"
ACROSS, WIDTH, HEIGHT = 3, 3.2, 2.1  # maximum number of panels in a row, and width and height of a panel in inches


def drawable(written):
    return [row for row in written if row.tflops != "" and not (is_ours(row) and row.wrong)]


def figure(written):
    """Return a figure with a line for each provider and a panel for each mode and kind of case with several lengths."""
    from matplotlib.figure import Figure

    if not (timed := drawable(written)):
        raise ValueError("no row has a speed to draw")
    panels = collections.defaultdict(list)
    for row in sorted(timed, key=lambda row: (row.mode != "forward", row.mode, row.causal, row.D)):
        panels[row.mode, kind(row.case)].append(row)
    panels = {key: some for key, some in panels.items() if len({row.Sk for row in some}) > 1} or panels
    names = {row.provider: is_ours(row) for some in panels.values() for row in some}
    names = sorted(names, key=lambda name: (not names[name], name))
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    drawn = Figure(figsize=(max(7.0, WIDTH * across), HEIGHT * down + 0.9), dpi=150, layout="constrained")
    axes = [*drawn.subplots(down, across, squeeze=False).flat]
    for ax, ((mode, case), some) in zip(axes, panels.items(), strict=False):
        for i, provider in enumerate(names):
            points = sorted({row.Sk: row.tflops for row in some if row.provider == provider}.items())
            if points:
                ax.plot(*zip(*points, strict=True), f"C{i}{MARKERS[i % len(MARKERS)]}-", label=provider)
        lengths = sorted({row.Sk for row in some})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{x // 1024}k" if x % 1024 == 0 else f"{x}" for x in lengths])
        ax.set(ylim=(0, 1.1 * ax.get_ylim()[1]), xlabel="sequence length (tokens)", ylabel="TFLOP/s")
        ax.set_title(_title(mode, case), fontsize=10)
        ax.grid(alpha=0.4)
    for ax in axes[len(panels) :]:
        ax.remove()
    last = timed[-1]
    where = "a CPU" if last.gpu == "cpu" else last.gpu
    drawn.suptitle(f"Attention on {where}, torch {last.torch}, {last.date[:10]}", fontsize=12)
    lines = {line.get_label(): line for ax in drawn.axes for line in ax.lines}
    columns = max(1, int(12 * drawn.get_figwidth()) // (max(map(len, names)) + 6))  # 12 letters take an inch
    drawn.legend([lines[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False)
    return drawn


def _title(mode, case):
    words = [mode.replace("_", " + "), DTYPES.get(case.dtype, case.dtype)]
    words += [f"D {case.D}" if case.D == case.Dv else f"D {case.D}, Dv {case.Dv}", "causal" if case.causal else "full"]
    words += [f"{case.Hq // case.Hkv} heads share keys"] * (case.Hq != case.Hkv)
    words += [f"{case.Sq} queries"] * (case.Sq > 0) + case.words
    return textwrap.fill(", ".join(words), 36)  # 36 characters fit over a panel


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("python -m fusedattn.bench.plot FILE.csv FILE.png [PROVIDER ...]")
    _, source, target, *names = sys.argv
    written = rows.read(source)
    if names:
        written = [row for some in last_runs(written, names) for row in some]
    if not written:
        sys.exit(f"{source}: no run of `bench --preset paper` timed all of {', '.join(names)}")
    figure(written).savefig(target, format="png")
