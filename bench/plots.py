"""How does speed grow with length, and what bounds it?    python -m fusedattn.bench.plots FILE.csv --out PNG

Pictures of rows alone, those of the last run among them; they need matplotlib, and leave pyplot alone.
"""

import argparse
import collections
import math
import sys
import textwrap

from . import providers, rows, table

INK, GRID, CEILING = "#333333", "#e6e6e6", "#777777"
OURS = "#d1371f"
OTHERS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#7f7f7f", "#cc79a7", "#5a3d8a", "#8c6d31", "#222222")
MARKERS = "s^DvP<X>"  # one fewer than colours: a second round through both is told apart
LINES, FILLS = ("-", "--", ":", "-."), ("full", "none", "left", "right")  # of ours, by lines and where one is a point
ROUNDS = "ohp"  # of ours, when there are no more lines
ACROSS, WIDTH, HEIGHT = 4, 3.3, 2.6  # panels beside each other at most, and the inches of one
MODES = {"forward_backward": "forward + backward"}


def is_ours(row):
    return row.provider.startswith("fusedattn")


def kind(case):
    """What the points of one line share: all of a case but its batch and its length."""
    return case._replace(B=0, Sq=0 if case.Sq == case.Sk else case.Sq, Sk=0)


def drawable(written):
    """The rows of the last run that have a speed; ours only if they are right."""
    return [row for row in table.last_run(written) if row.tflops != "" and not (is_ours(row) and row.status == "wrong")]


def unit(written):
    """(name, how many of it are a TFLOP/s) of speeds as these rows have them."""
    most = max((row.tflops for row in written if row.tflops != ""), default=1.0)
    return ("TFLOP/s", 1.0) if most >= 1.0 else ("GFLOP/s", 1e3)


def speed(written):
    """A figure of speed against length: a panel a mode and kind of case, a line a provider."""
    return _figure(written, _speed)


def roofline(written):
    """A figure of speed against operations a byte, under the ceilings measured: a panel a mode and dtype."""
    return _figure(written, _roofline)


def draw(written):
    """Both in one figure."""
    return _figure(written, _speed, _roofline)


class _Picture:
    """Panels and how to draw them, before there is a figure."""

    def __init__(self, places, across, panel):
        self.places, self.across, self.panel = places, across, panel  # {place: what panel(axes, what) draws}
        self.down = max(places) // across + 1

    def draw(self, figure):
        grid = figure.subplots(self.down, self.across, squeeze=False).flat
        for place, axes in enumerate(grid):
            if place not in self.places:
                axes.remove()
                continue
            self.panel(axes, *self.places[place])
            axes.grid(color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(colors=INK, length=0, labelsize=8)
            axes.title.set(fontsize=10, color=INK)
            for axis in (axes.xaxis, axes.yaxis):
                axis.label.set(fontsize=9, color=INK)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(GRID)


def _figure(written, *pictures):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed: pip install 'fusedattn[plot]'") from error
    timed = drawable(written)
    if not timed:
        raise ValueError("there is no row with a speed to draw")
    styles = _styles(row.provider for row in timed)
    made = [picture(timed, styles) for picture in pictures]
    heights = [HEIGHT * picture.down for picture in made]
    size = (max(7.0, WIDTH * max(picture.across for picture in made)), sum(heights) + 0.9)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    parts = figure.subfigures(len(made), 1, height_ratios=heights, squeeze=False)[:, 0]
    for picture, part in zip(made, parts, strict=True):
        picture.draw(part)
    first = timed[0]
    where = "the CPU" if first.gpu == "cpu" else first.gpu
    triton = f", triton {first.triton}" if first.triton and where == first.gpu else ""
    figure.suptitle(f"Attention on {where}, torch {first.torch}{triton}, {first.date[:10]}", fontsize=11, color=INK)
    _legend(figure, styles)
    return figure


def _legend(figure, styles):
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **style, label=name) for name, style in styles.items()]
    down = math.ceil(len(lines) * 1.7 / figure.get_figwidth())  # inches that one takes
    across = math.ceil(len(lines) / down)
    figure.legend(handles=lines, loc="outside lower center", ncols=across, frameon=False, fontsize=9, labelcolor=INK)


def _styles(names):
    """{provider: how its line looks}, the same one in every picture; ours first, on top."""
    known = [name for name in providers.PROVIDERS | providers.ASIDE if not name.startswith("fusedattn")]
    names = sorted(set(names))
    mine = [name for name in names if name.startswith("fusedattn")]
    known += [name for name in names if name not in (*known, *mine)]
    styles = {
        name: dict(
            color=OURS,
            marker=ROUNDS[index // len(LINES)],
            linestyle=LINES[index % len(LINES)],
            fillstyle=FILLS[index % len(FILLS)],
            linewidth=2.4,
            markersize=6,
            zorder=4,
        )
        for index, name in enumerate(mine)
    }
    for index, name in enumerate(known):
        if name in names:
            color, marker = OTHERS[index % len(OTHERS)], MARKERS[index % len(MARKERS)]
            styles[name] = dict(color=color, marker=marker, linestyle="-", linewidth=1.4, markersize=5, zorder=3)
    return styles


def _speed(timed, styles):
    panels = _kinds(timed)
    most = collections.Counter(mode for mode, _ in panels).most_common(1)[0][1]
    across, places = min(ACROSS, most), {}
    for mode in dict.fromkeys(mode for mode, _ in panels):  # each starts a line of its own
        start = math.ceil((max(places, default=-1) + 1) / across) * across
        places |= {start + index: key for index, key in enumerate(key for key in panels if key[0] == mode)}
    name, factor = unit(timed)

    def panel(axes, mode, kind):
        some = panels[mode, kind]
        for provider, style in styles.items():
            points = sorted((row.Sk, factor * row.tflops) for row in some if row.provider == provider)
            axes.plot(*zip(*points, strict=True) if points else ([], []), **style, label=provider)
        lengths = sorted({row.Sk for row in some})
        axes.set_xscale("log", base=2)
        axes.set_xticks(_apart(lengths), [_length(each) for each in _apart(lengths)])
        axes.set_xticks([], minor=True)
        axes.set(xlim=(lengths[0] / 1.3, lengths[-1] * 1.3), ylim=(0, 1.1 * factor * max(row.tflops for row in some)))
        axes.set(title=_title(mode, kind), xlabel="sequence length", ylabel=name)

    return _Picture(places, across, panel)


def _roofline(timed, styles):
    from matplotlib.ticker import LogLocator, NullLocator

    panels = collections.defaultdict(list)
    for row in timed:
        panels[row.mode, row.dtype].append(row)
    name, factor = unit(timed)

    def panel(axes, mode, dtype):
        some = panels[mode, dtype]
        for provider, style in styles.items():
            points = [(_intensity(row), factor * row.tflops) for row in some if row.provider == provider]
            own = style | dict(linestyle="", alpha=0.8, markersize=style["markersize"] - 1)
            axes.plot(*zip(*points, strict=True) if points else ([], []), **own, label=provider)
        xs, ys = [_intensity(row) for row in some], [factor * row.tflops for row in some]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(min(xs) / 1.5, max(xs) * 1.5), ylim=(min(ys) / 2, max(ys) * 2))
        _ceilings(axes, some, name, factor)
        for axis, locator in ((axes.xaxis, LogLocator(base=2)), (axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0)))):
            axis.set_major_locator(locator)
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_locator(NullLocator())
        axes.set(title=f"roofline: {_title(mode)}, {_dtype(dtype)}", xlabel="operations a byte", ylabel=name)

    return _Picture(dict(enumerate(panels)), min(ACROSS, len(panels)), panel)


def _ceilings(axes, some, name, factor):
    """The most that products and that memory allow, by what this machine was measured to reach."""
    measured = [row for row in some if row.matmul_tflops != "" and row.copy_gbps != ""]
    if not measured:
        return
    products, memory = measured[-1].matmul_tflops, measured[-1].copy_gbps / 1e3
    (low, high), (bottom, top), ridge = axes.get_xlim(), axes.get_ylim(), products / memory
    low, high = min(low, ridge / 2), max(high, ridge * 2)
    bottom, top = min(bottom, factor * memory * low), max(top, 2.5 * factor * products)
    axes.set(xlim=(low, high), ylim=(bottom, top))
    xs = [low, ridge, high]
    axes.plot(
        xs, [factor * min(products, memory * x) for x in xs], color=CEILING, linewidth=1.2, zorder=2, label="ceilings"
    )
    style, above = dict(color=CEILING, fontsize=8, va="bottom"), 1.1 * factor * products
    axes.text(low, above, f" copy {_round(1e3 * memory)} GB/s", ha="left", **style)  # no point lies above a slope
    axes.text(high, above, f"products {_round(factor * products)} {name}", ha="right", **style)


def _round(number):
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _kinds(timed):
    """{(mode, kind): rows}; a batch of its own where two would have the same length."""
    found, cases = collections.defaultdict(list), collections.defaultdict(set)
    for row in timed:
        case = table.case_of(row)
        cases[kind(case)].add(case)
    for row in timed:
        case = table.case_of(row)
        alike = cases[kind(case)]
        apart = len(alike) > len({each.Sk for each in alike})
        found[row.mode, kind(case)._replace(B=case.B if apart else 0)].append(row)
    return found


def _intensity(row):
    """Operations a byte, as bench/cost.py counts both."""
    return 1e3 * row.tflops / row.gbps


def _title(mode, kind=None):
    words = [MODES.get(mode, mode)]
    if kind:
        words += [_dtype(kind.dtype), f"d{kind.D}" if kind.D == kind.Dv else f"d{kind.D}-{kind.Dv}"]
        words += ["causal" if kind.causal else "full"]
        words += [f"gqa{kind.Hq // kind.Hkv}"] * (kind.Hq != kind.Hkv)
        words += [f"{kind.Sq} queries"] * (kind.Sq > 0) + [f"batch {kind.B}"] * (kind.B > 0) + kind.options.split()
    return textwrap.fill(", ".join(words), 40)  # letters that fit over a panel


def _dtype(name):
    return table.DTYPES.get(name, name)


def _length(length):
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _apart(lengths):
    """Those that can stand beside each other on a logarithmic axis, the longest among them."""
    shown = []
    for length in reversed(lengths):
        if not shown or shown[-1] / length > 1.3:
            shown.append(length)
    return shown[::-1]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fusedattn.bench.plots", description=__doc__.partition("\n")[0])
    parser.add_argument("csv", metavar="FILE", help="rows that a benchmark wrote")
    parser.add_argument("--out", metavar="PNG", required=True, help="where to save the picture")
    options = parser.parse_args(arguments)
    try:
        figure = draw(rows.read(options.csv))
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    figure.savefig(options.out, format="png")


if __name__ == "__main__":
    sys.exit(main())
