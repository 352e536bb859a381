"""The picture: the losses during training, and the attention of each head to one sentence."""

import warnings
from pathlib import Path

import torch
from torch import Tensor

from ...plot import INK, attention_map
from .text import Text
from .training import Point, bits, byte_frequencies

TOP, LINES = 8.4, 28  # bits a byte, above those of an untrained model; lines of text in the height of the axes


def draw(path: str, points: list[Point], text: Text, sentence: str, maps: Tensor) -> None:
    """Save a PNG. maps (H, S, S): the weights of the last layer, to the bytes of the sentence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.2, 7.0), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    left, right = figure.subfigures(1, 2, width_ratios=(1.4, 2.2), squeeze=False)[0]
    title = f"A byte-level language model learns\n{Path(text.name).name}"
    _losses(left.subplots(), points, byte_frequencies(text), title)
    attention_map(
        maps,
        [label for letter in sentence for label in (letter, *[""] * (len(letter.encode()) - 1))],  # one a byte
        mask=torch.ones(maps.shape[1:], dtype=torch.bool).tril(),  # what comes later is hidden
        titles=[f"Last layer, head {head + 1}" for head in range(len(maps))],
        label="attention of a row's byte to a column's",
        top=1.0,
        figure=right,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a byte of the text may have no letter in any font
        figure.savefig(path, format="png")


def _losses(axes, points, frequencies, title):
    steps, lowest = [point.step for point in points], bits(frequencies)
    axes.axhline(lowest, color="#999999", linewidth=1.0, linestyle="--")
    labels = [(lowest, "byte\nfrequencies", "#777777")]
    for name, color in (("train", "#4878b6"), ("held_out", "#d1603d")):
        heights = [bits(getattr(point, name)) for point in points]
        axes.plot(steps, heights, color=color, linewidth=2.2)
        labels.append((heights[-1], f"{name.replace('_', ' ')} {heights[-1]:.2f}", color))
        lowest = min(lowest, *heights)
    # A label stands beside the end of its line, outside of the axes; or higher, where the one below takes its place.
    free = bottom = max(0.0, (lowest - 0.4) // 1)
    for height, text, color in sorted(labels):
        half = (1 + text.count("\n")) * (TOP - bottom) / LINES / 2
        place = (steps[-1], max(height, free + half))
        axes.annotate(text, place, (6, 0), textcoords="offset points", color=color, fontsize=10, va="center")
        free = place[1] + half
    axes.set(xlim=(0, steps[-1]), ylim=(bottom, max(TOP, free)), xlabel="step", ylabel="bits per byte", title=title)
    axes.title.set_parse_math(False)  # the name of a file may have any letters
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(INK)
    axes.locator_params("x", integer=True)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
