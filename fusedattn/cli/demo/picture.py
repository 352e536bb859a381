"""The picture: how the losses fell, and what each head attends to in one sentence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...plot import attention_map
from .training import Point, bits

INK, TRAIN, HELD_OUT = "#333333", "#4878b6", "#d1603d"


def draw(path: str, points: Sequence[Point], frequencies: float, sentence: str, maps: Tensor, title: str) -> None:
    """Save a PNG. frequencies: nats a byte of their entropy. maps: (H, S, S) weights of one layer over the sentence."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(12.6, 7.0), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)  # no window, whatever the machine has
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 2.2), squeeze=False)[0]
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
    steps, floor = [point.step for point in points], bits(frequencies)
    train, held_out = [bits(point.train) for point in points], [bits(point.held_out) for point in points]
    axes.axhline(floor, color="#999999", linewidth=1.0, linestyle="--")
    axes.text(steps[-1], floor + 0.05, "byte frequencies alone", color="#777777", fontsize=10, ha="right")
    late = len(steps) * 3 // 4  # a label stands clear of the part of its curve that it is beside
    train_above = train[-1] > held_out[-1]
    for values, name, color, above in (
        (train, "train", TRAIN, train_above),
        (held_out, "held out", HELD_OUT, not train_above),
    ):
        axes.plot(steps, values, color=color, linewidth=2.2)
        edge, shift = (max(values[late:]), 11) if above else (min(values[late:]), -11)
        axes.annotate(
            f"{name} {values[-1]:.2f}",
            (steps[-1], edge),
            (0, shift),
            textcoords="offset points",
            color=color,
            fontsize=11,
            ha="right",
            va="center",
        )
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(max(0.0, (min(train + held_out) - 0.4) // 1), 8.4)
    axes.set_title(title, fontsize=12, color=INK)
    axes.set_xlabel("step", color=INK, fontsize=10)
    axes.set_ylabel("bits per byte", color=INK, fontsize=10)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
