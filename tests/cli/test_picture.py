"""The demo's picture: what is written in it can be read."""

import itertools

import pytest

from fusedattn.cli.demo import picture
from fusedattn.cli.demo.training import Point

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "train, held_out",
    [(0.01, 0.02), (0.5, 0.5), (2.16, 2.49), (3.3, 3.32), (5.739, 5.739), (4.19, 3.93)],
    ids=["learned by heart", "the same", "as usual", "at the frequencies", "nothing learned", "three steps"],
)
def test_labels_are_clear_of_the_axis_the_curves_and_each_other(train, held_out):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.1, 7.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    picture._losses(axes, [Point(0, 5.739, 5.739), Point(1, 5.7, 5.0), Point(3, train, held_out)], 3.31, "A title")
    figure.canvas.draw()
    inside = axes.get_window_extent()
    labels = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert len(labels) == 3 and {text.partition(" ")[0] for text in labels} == {"train", "held", "byte\nfrequencies"}
    for box in labels.values():
        assert inside.y0 <= box.y0 and box.y1 <= inside.y1 and inside.x1 < box.x0 and box.x1 <= figure.bbox.x1
    assert not any(one.overlaps(other) for one, other in itertools.combinations(labels.values(), 2))
    assert all(float(text.get_text()).is_integer() for text in axes.get_xticklabels())
