"""The picture: how the losses fell, and what each head attends to in one sentence."""

from collections.abc import Sequence

import numpy
from torch import Tensor

from .training import Point, bits

SIGNS = {" ": "\u00b7", "\n": "\u21b5"}  # what a blank and the end of a line are drawn as
INK, TRAIN, HELD_OUT = "#333333", "#4878b6", "#d1603d"


def draw(path: str, points: Sequence[Point], frequencies: float, sentence: str, maps: Tensor, title: str) -> None:
    """Save a PNG. frequencies: nats a byte of their entropy. maps: (H, S, S) weights of one layer over the sentence."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(12.6, 7.0), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)  # no window, whatever the machine has
    columns = (len(maps) + 1) // 2
    cells = figure.add_gridspec(2, 1 + columns, width_ratios=(1.25, *(1.0,) * columns))
    _losses(figure.add_subplot(cells[:, 0]), points, frequencies, title)
    grid = [figure.add_subplot(cells[head // columns, 1 + head % columns]) for head in range(len(maps))]
    for head, axes in enumerate(grid):
        shown = _attention(axes, maps[head], sentence, f"Last layer, head {head + 1}")
    bar = figure.colorbar(shown, ax=grid, fraction=0.025, aspect=50, pad=0.015, ticks=(0.0, 0.1, 0.25, 0.5, 0.75, 1.0))
    bar.set_label("attention of a row's byte to a column's", color=INK, fontsize=10)
    bar.ax.tick_params(labelsize=9, colors=INK, length=2)
    bar.outline.set_visible(False)
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


def _attention(axes, weights, sentence, title):
    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm

    seen = weights.float().cpu().tril().numpy()
    seen[~numpy.tri(len(seen), dtype=bool)] = numpy.nan  # what comes later is hidden, which is not a weight of 0
    colors = colormaps["Blues"].with_extremes(bad="#f0f0f0")
    # Square roots spread the many small weights over the colours; the bar says what each stands for.
    shown = axes.imshow(seen, cmap=colors, norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    signs = [SIGNS.get(letter, letter) for letter in sentence]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(signs)), signs, fontfamily="monospace", fontsize=9, color=INK)
        axis.set_tick_params(length=0, pad=2)
    axes.set_title(title, fontsize=11, color=INK, pad=4)
    axes.spines[:].set_color("#cccccc")
    return shown
