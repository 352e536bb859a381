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
from .providers import PROVIDERS
from .report import is_ours, kind, last_runs, unit

OURS = "#d1371f"
OTHERS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#7f7f7f", "#cc79a7", "#5a3d8a", "#8c6d31", "#222222")
LINES, MARKERS = ("-", "--", ":", "-."), "s^DvP<X>"
LABELS = {"sdpa:cudnn": "cuDNN (sdpa:cudnn)", "sdpa:flash": "FlashAttention-2 (sdpa:flash)"}
ACROSS, WIDTH, HEIGHT = 3, 3.2, 2.1  # maximum number of panels in a row, and width and height of a panel in inches


def drawable(written):
    return [row for row in written if row.tflops != "" and not (is_ours(row) and row.status == "wrong")]


def figure(written):
    """Return a figure with a line for each provider and a panel for each mode and kind of case with several lengths."""
    from matplotlib.figure import Figure

    if not (timed := drawable(written)):
        raise ValueError("no row has a speed to draw")
    panels, (name, factor) = collections.defaultdict(list), unit(timed)
    for row in sorted(timed, key=lambda row: (row.mode != "forward", row.mode, row.causal, row.D)):
        panels[row.mode, kind(row.case)].append(row)
    panels = {key: some for key, some in panels.items() if len({row.Sk for row in some}) > 1} or panels
    styles, across = _styles([row for some in panels.values() for row in some]), min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    size = max(7.0, WIDTH * across), HEIGHT * down + 0.9
    drawn = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    axes = [*drawn.subplots(down, across, squeeze=False).flat]
    for ax, ((mode, case), some) in zip(axes, panels.items(), strict=False):
        for provider, style in styles.items():
            points = sorted({row.Sk: factor * row.tflops for row in some if row.provider == provider}.items())
            if points:
                ax.plot(*zip(*points, strict=True), **style, label=LABELS.get(provider, provider))
        lengths = sorted({row.Sk for row in some})
        ax.set_xscale("log", base=2)
        ax.set_xticks(lengths, [f"{x // 1024}k" if x % 1024 == 0 else f"{x}" for x in lengths])
        ax.set_xticks([], minor=True)
        ax.set(xlim=(lengths[0] / 1.3, lengths[-1] * 1.3), ylim=(0, 1.1 * factor * max(row.tflops for row in some)))
        ax.set(xlabel="sequence length (tokens)", ylabel=name)
        ax.set_title(_title(mode, case), fontsize=10)
        ax.grid(color="#e6e6e6", linewidth=0.8)
        ax.tick_params(length=0, labelsize=9)
        ax.spines[["top", "right", "left"]].set_visible(False)
    for ax in axes[len(panels) :]:
        ax.remove()
    last = timed[-1]
    where = "a CPU" if last.gpu == "cpu" else last.gpu
    drawn.suptitle(f"Attention on {where}, torch {last.torch}, {last.date[:10]}", fontsize=12)
    lines = {line.get_label(): line for ax in drawn.axes for line in ax.lines}
    columns = max(1, int(size[0] / 1.5 / max(1, max(map(len, lines)) / 14)))  # 14 letters take 1.5 inches
    drawn.legend(lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    return drawn


def _styles(timed):
    """Return {provider: style of its line}, fusedattn first. A provider has the same colour in all plots."""
    names = dict.fromkeys(row.provider for row in timed)
    styles = {}
    for i, name in enumerate(name for name in names if name.startswith("fusedattn")):
        styles[name] = dict(color=OURS, linestyle=LINES[i % 4], marker="o", linewidth=2.4, zorder=4)
    for i, name in enumerate(name for name in PROVIDERS | names if not name.startswith("fusedattn")):
        look = dict(color=OTHERS[i % len(OTHERS)], marker=MARKERS[i % len(MARKERS)])
        styles[name] = look | dict(linewidth=1.4, markersize=5)
    return {name: style for name, style in styles.items() if name in names}


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
