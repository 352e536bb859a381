"""Tests the plots: values, colours, tick labels, and errors."""

import io
import math
import sys

import pytest
import torch

import fusedattn as fa
from fusedattn import layers, plot

from .conftest import run_python

matplotlib = pytest.importorskip("matplotlib")


def panels(figure):
    return [axes for axes in figure.axes if axes.images]


def drawn(axes):
    """Return the values of an image as a tensor, NaN where nothing is drawn."""
    data = axes.images[0].get_array()
    return torch.tensor(data.astype(float).filled(math.nan))


def written(axis):
    return {round(tick.get_loc()): tick.label1.get_text() for tick in axis.get_major_ticks()}


def saved(figure):
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=40)
    return content.getvalue()


def weights(*shape):
    return torch.randn(shape).softmax(-1)


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (1, 1, 5, 5), (3, 5, 5), (1, 3, 5, 5)], ids=str)
def test_a_panel_a_head_in_one_scale(shape):
    dtype = (torch.float32, torch.bfloat16, torch.float64)[len(shape) - 2]
    given = weights(*shape).to(dtype).requires_grad_()
    figure, heads = plot.attention_map(given), given.detach().double().reshape(-1, 5, 5)
    shown = panels(figure)
    assert len(shown) == len(heads)
    for axes, want in zip(shown, heads, strict=True):
        assert torch.equal(drawn(axes), want)
        assert axes.images[0].norm is shown[0].images[0].norm and axes.images[0].get_cmap().name == "Blues"
    norm = shown[0].images[0].norm
    assert (norm.vmin, norm.vmax) == (0.0, heads.max().item())
    assert [axes.get_title() for axes in shown] == (["head 1", "head 2", "head 3"] if len(heads) > 1 else [""])
    (bar,) = (axes for axes in figure.axes if axes.get_ylabel())
    assert bar.get_ylabel() == "attention weight" and len(figure.axes) == len(heads) + 1


@pytest.mark.parametrize(("batch", "heads", "last"), [(1, 2, "head 2"), (2, 1, "batch 2"), (2, 2, "batch 2, head 2")])
def test_blocks_of_a_plan(batch, heads, last):
    assert panels(plot.plan(fa.plan(torch.rand(batch, heads, 70, 70) < 0.5)))[-1].get_title() == last


WORDS = ["a", " the", "$x$", "\n"]
# (tokens, key_tokens, labels of the queries, labels of the keys, angle of the latter)
NAMED = {
    "words": (WORDS, None, ["a", "\u00b7the", "$x$", "\u21b5"], ["a", "\u00b7the", "$x$", "\u21b5"], 90.0),
    "letters of a string": ("abc", None, "abc", "abc", 0.0),
    "other keys": ([7, 8], "abc", ["7", "8"], "abc", 0.0),
    "as many others": ("abc", "xyz", "abc", "xyz", 0.0),
}


@pytest.mark.parametrize("tokens, keys, rows, columns, angle", NAMED.values(), ids=NAMED)
def test_names_of_queries_and_keys(tokens, keys, rows, columns, angle):
    (axes,) = panels(plot.attention_map(weights(len(rows), len(columns)), tokens, keys))
    assert written(axes.yaxis) == dict(enumerate(rows)) and written(axes.xaxis) == dict(enumerate(columns))
    ticks = axes.xaxis.get_major_ticks()
    assert {tick.label1.get_rotation() for tick in ticks} == {angle}
    assert not any(tick.label1.get_parse_math() for tick in ticks if "$" in tick.label1.get_text())


def test_what_has_no_names_is_numbered_and_names_that_do_not_fit_are_left_out():
    figure = plot.attention_map(weights(2, 30), "ab")
    saved(figure)
    (axes,) = panels(figure)
    inside = {place: name for place, name in written(axes.xaxis).items() if 0 <= place < 30}
    assert len(inside) > 3 and all(str(place) == name for place, name in inside.items())
    (axes,) = panels(plot.attention_map(weights(300, 300), [f"t{i}" for i in range(300)]))
    names = written(axes.yaxis)
    assert 20 < len(names) < 150 and all(name == f"t{place}" for place, name in names.items())


@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (2, 4, 4), (1, 1, 4, 4), (1, 2, 4, 4)], ids=str)
def test_what_a_mask_hides_is_grey_and_not_a_weight(shape):
    mask = torch.ones(4, 4).tril().bool()
    given = weights(2, 4, 4) * mask
    given[:, 1, 0] = 0.0
    figure = plot.attention_map(given, mask=mask.expand(shape))
    for axes, want in zip(panels(figure), given, strict=True):
        assert torch.equal(drawn(axes).isnan(), ~mask)
        assert torch.equal(drawn(axes)[mask], want.double()[mask])
        cmap = axes.images[0].get_cmap()
        assert matplotlib.colors.to_hex(cmap.get_bad()) == "#f0f0f0" != matplotlib.colors.to_hex(cmap(0.0))
    hidden = given.masked_fill(~mask, math.nan)
    for axes, other in zip(panels(plot.attention_map(hidden)), panels(figure), strict=True):
        assert torch.equal(drawn(axes).nan_to_num(-1.0), drawn(other).nan_to_num(-1.0))
    assert not given.isnan().any()  # the input is unchanged


def test_titles_label_and_the_darkest_weight():
    figure = plot.attention_map(weights(2, 3, 3), titles=["one", "two"], label="share", top=1.0)
    assert [axes.get_title() for axes in panels(figure)] == ["one", "two"]
    assert any(axes.get_ylabel() == "share" for axes in figure.axes)
    norm = panels(figure)[0].images[0].norm
    assert norm.vmax == 1.0 and abs(norm(0.25) - 0.5) < 1e-6
    assert panels(plot.attention_map(torch.zeros(2, 2)))[0].images[0].norm.vmax == 1.0


def test_drawn_into_a_part_of_a_figure():
    whole = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    left, right = whole.subfigures(1, 2)
    assert plot.attention_map(weights(4, 3, 3), "abc", figure=left) is left
    assert plot.positional_encoding(torch.randn(3, 2), figure=right) is right
    assert len(panels(left)) == 4 and len(panels(right)) == 1 and saved(whole)


def test_positional_encoding():
    pe = layers.SinusoidalPositionalEncoding(4, 7).pe
    (axes,) = panels(plot.positional_encoding(pe[None].float()))
    assert torch.equal(drawn(axes), pe.float().double())
    assert axes.get_ylabel() == "position" and axes.get_xlabel() == "dimension"
    norm = axes.images[0].norm
    assert norm.vmin == -norm.vmax == -pe.float().abs().max().item()


@pytest.mark.parametrize("draw", [plot.attention_map, plot.positional_encoding])
def test_without_matplotlib_it_says_what_to_install(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'fusedattn\[plot\]'"):
        draw(weights(2, 2))


@pytest.mark.matrix
def test_pyplot_is_left_alone_and_matplotlib_is_late():
    drawing = "plot.attention_map(torch.ones(2, 2)), plot.positional_encoding(torch.ones(2, 2))"
    late, alone = "assert 'matplotlib' not in sys.modules", "assert 'matplotlib.pyplot' not in sys.modules"
    run_python("-c", f"import sys, torch; from fusedattn import plot; {late}; {drawing}; {alone}")


# tests/test_hostile.py has every kind of value for each argument.
@pytest.mark.parametrize(
    ("message", "draw"),
    [
        ("weights: .*weights\\[0\\]", lambda: plot.attention_map(weights(2, 3, 4, 4))),
        ("weights: .*-1 to 1", lambda: plot.attention_map(torch.tensor([[-1.0, 1.0]]))),
        ("weights: .*inf", lambda: plot.attention_map(torch.tensor([[0.0, math.inf]]))),
        ("tokens: .*3 names, got 2", lambda: plot.attention_map(weights(3, 3), "ab")),
        ("key_tokens: .*3 names", lambda: plot.attention_map(weights(2, 3), "ab", "ab")),
        ("plan: ", lambda: plot.plan(fa.plan(fa.masks.causal, rows=0, keys=7))),
        ("pe: .*finite", lambda: plot.positional_encoding(torch.tensor([[math.nan]]))),
    ],
)
def test_a_wrong_argument_is_named(message, draw):
    with pytest.raises(ValueError, match=f"^{message}"):
        draw()
