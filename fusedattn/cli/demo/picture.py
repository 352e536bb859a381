"""The picture: how the losses fell, and what each head attends to in one sentence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...plot import attention_map
from .training import Point, bits

INK, TRAIN, HELD_OUT = "#333333", "#4878b6", "#d1603d"
LINES = 28  # of a label, that the height of the axes has room for


def draw(path: str, points: Sequence[Point], frequencies: float, sentence: str, maps: Tensor, title: str) -> None:
    """Save a PNG. frequencies: nats a byte of their entropy. maps: (H, S, S) weights of one layer over the sentence."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(13.2, 7.0), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)  # no window, whatever the machine has
    left, right = figure.subfigures(1, 2, width_ratios=(1.4, 2.2), squeeze=False)[0]
    _losses(left.subplots(), points, frequencies, title)
    attention_map(
        maps,
        sentence,
        mask=torch.ones(maps.shape[1:], dtype=torch.bool).tril(),  # what comes later is hidden
        titles=[f"Last layer, head {head + 1}" for head in range(len(maps))],
        label="attention of a row's byte to a column's",
        top=1.0,
        figure=right,
    )
    figure.savefig(path, format="png")


def _losses(axes, points, frequencies, title):
    from matplotlib.ticker import MaxNLocator

    steps, floor = [point.step for point in points], bits(frequencies)
    train, held_out = [bits(point.train) for point in points], [bits(point.held_out) for point in points]
    axes.axhline(floor, color="#999999", linewidth=1.0, linestyle="--")
    axes.plot(steps, train, color=TRAIN, linewidth=2.2)
    axes.plot(steps, held_out, color=HELD_OUT, linewidth=2.2)
    bottom, top = max(0.0, (min(*train, *held_out, floor) - 0.4) // 1), 8.4
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(bottom, top)
    ends = {
        f"train {train[-1]:.2f}": (train[-1], TRAIN),
        f"held out {held_out[-1]:.2f}": (held_out[-1], HELD_OUT),
        "byte\nfrequencies": (floor, "#777777"),
    }
    # Each stands beside the end of its line, past the axes, as near to its height as the others let it.
    places = _apart([(y, 1 + text.count("\n")) for text, (y, _) in ends.items()], bottom, top, (top - bottom) / LINES)
    for (text, (_, color)), place in zip(ends.items(), places, strict=True):
        axes.annotate(
            text, (steps[-1], place), (6, 0), textcoords="offset points", color=color, fontsize=10, va="center"
        )
    axes.set_title(title, fontsize=12, color=INK)
    axes.set_xlabel("step", color=INK, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_ylabel("bits per byte", color=INK, fontsize=10)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _apart(wanted, bottom, top, line):
    """Heights for labels of (height, lines) each: between bottom and top, none over another, in the order wanted."""
    found, free = dict.fromkeys(range(len(wanted)), 0.0), bottom
    upwards = sorted(range(len(wanted)), key=lambda index: wanted[index][0])
    for index in upwards:
        height, lines = wanted[index]
        found[index] = max(height, free + lines * line / 2)
        free = found[index] + lines * line / 2
    free = top
    for index in reversed(upwards):
        half = wanted[index][1] * line / 2
        found[index] = min(found[index], free - half)
        free = found[index] - half
    return list(found.values())
