"""The picture: how the losses fell, and what each head attends to in one sentence."""

from collections.abc import Sequence

from torch import Tensor

from .training import Point, bits

SIGNS = {" ": "\u00b7", "\n": "\u21b5"}  # what a blank and the end of a line are drawn as
INK, TRAIN, HELD_OUT = "#333333", "#4878b6", "#d1603d"


def draw(path: str, points: Sequence[Point], frequencies: float, sentence: str, maps: Tensor, title: str) -> None:
    """Save a PNG. frequencies: nats a byte of their entropy. maps: (H, S, S) weights of one layer over the sentence."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 6.6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, width_ratios=(1.0, 1.22), wspace=0.03)
    _losses(left.subplots(), points, frequencies, title)
    grid = right.subplots(2, 2)
    for head, axes in enumerate(grid.flat):
        shown = _attention(axes, maps[head], sentence, f"head {head + 1}")
    right.suptitle("What each head of the last layer attends to", fontsize=12, color=INK)
    bar = right.colorbar(shown, ax=grid, fraction=0.03, aspect=45, pad=0.02)
    bar.set_ticks([0.0, 0.25, 0.5, 0.75, 1.0])
    bar.set_label("attention weight", color=INK, fontsize=9)
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.outline.set_visible(False)
    figure.savefig(path, format="png")


def _losses(axes, points, frequencies, title):
    steps = [point.step for point in points]
    train, held_out = [bits(point.train) for point in points], [bits(point.held_out) for point in points]
    axes.plot(steps, train, color=TRAIN, linewidth=2.0)
    axes.plot(steps, held_out, color=HELD_OUT, linewidth=2.0)
    axes.axhline(bits(frequencies), color="#999999", linewidth=1.0, linestyle="--")
    axes.text(steps[-1], bits(frequencies) + 0.06, "byte frequencies alone", color="#777777", fontsize=9, ha="right")
    for values, name, color in ((train, "train", TRAIN), (held_out, "held out", HELD_OUT)):
        axes.annotate(
            f"{name} {values[-1]:.2f}", (steps[-1], values[-1]), (8, 0), textcoords="offset points", color=color,
            fontsize=10, va="center",
        )  # fmt: skip
    axes.set_xlim(0, steps[-1] * 1.22)
    axes.set_ylim(0, 8.4)
    axes.set_title(title, fontsize=12, color=INK)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("bits per byte", color=INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _attention(axes, weights, sentence, title):
    signs = [SIGNS.get(letter, letter) for letter in sentence]
    # Square roots spread the many small weights over the colours; the bar says what each stands for.
    from matplotlib.colors import PowerNorm

    shown = axes.imshow(
        weights.float().cpu().numpy(), cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(signs)), signs, fontfamily="monospace", fontsize=6.5, color=INK)
        axis.set_tick_params(length=0, pad=1.5)
    axes.xaxis.tick_bottom()
    axes.set_title(title, fontsize=10, color=INK, pad=3)
    axes.spines[:].set_color("#cccccc")
    return shown
