"""Pictures of the rows of the last run in a CSV: speed against length, and a roofline. They need matplotlib."""

import collections
import functools
import math
import textwrap

from . import providers, rows
from .cases import DTYPES
from .report import is_ours, kind, unit

INK, GRID, CEILING = "#333333", "#e6e6e6", "#777777"
OURS = "#d1371f"
OTHERS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#7f7f7f", "#cc79a7", "#5a3d8a", "#8c6d31", "#222222")
MARKERS = "s^DvP<X>"  # one fewer than colours, so that the pairs of a second round differ
LINES, FILLS = ("-", "--", ":", "-."), ("full", "none", "left", "right")  # of our lines, and of our points
ROUNDS = "ohp"  # our markers, one for as many providers as there are lines
ACROSS, WIDTH, HEIGHT = 4, 3.3, 2.6  # panels beside each other at most, and the inches of one


def drawable(written):
    """The rows of the last run that have a speed; ours only if they are right."""
    return [row for row in rows.last_run(written) if row.tflops != "" and not (is_ours(row) and row.status == "wrong")]


def _figure(pictures, written):
    """A figure of pictures; one is a function of (rows, styles) that returns {place: draw(axes)}, panels across."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise ImportError("matplotlib is not installed: pip install 'fusedattn[plot]'") from error
    timed = drawable(written)
    if not timed:
        raise ValueError("there is no row with a speed to draw")
    styles = _styles(row.provider for row in timed)
    grids = [picture(timed, styles) for picture in pictures]
    heights = [HEIGHT * (max(places) // across + 1) for places, across in grids]
    size = (max(7.0, WIDTH * max(across for _, across in grids)), sum(heights) + 0.9)
    figure = Figure(figsize=size, dpi=150, facecolor="white", layout="constrained")
    parts = figure.subfigures(len(grids), 1, height_ratios=heights, squeeze=False)[:, 0]
    for (places, across), part in zip(grids, parts, strict=True):
        for place, axes in enumerate(part.subplots(max(places) // across + 1, across, squeeze=False).flat):
            if place in places:
                places[place](axes)
                _decorate(axes)
            else:
                axes.remove()
    first = timed[0]
    where = "the CPU" if first.gpu == "cpu" else first.gpu
    triton = f", triton {first.triton}" if first.triton and where == first.gpu else ""
    figure.suptitle(f"Attention on {where}, torch {first.torch}{triton}, {first.date[:10]}", fontsize=11, color=INK)
    handles = [Line2D([], [], **style, label=name) for name, style in styles.items()]
    down = math.ceil(len(handles) * 1.7 / figure.get_figwidth())  # an entry is 1.7 inches wide
    layout = dict(loc="outside lower center", ncols=math.ceil(len(handles) / down), frameon=False)
    figure.legend(handles=handles, fontsize=9, labelcolor=INK, **layout)
    return figure


def _decorate(axes):
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, labelsize=8)
    axes.title.set(fontsize=10, color=INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _styles(names):
    """{provider: style of its line}, the same one in every picture; ours first, on top."""
    names = dict.fromkeys(sorted(names))
    mine = [name for name in names if name.startswith("fusedattn")]
    others = [name for name in providers.PROVIDERS | providers.ASIDE | names if not name.startswith("fusedattn")]
    styles = {}
    for index, name in enumerate(mine):
        look = dict(linestyle=LINES[index % len(LINES)], fillstyle=FILLS[index % len(FILLS)])
        look |= dict(marker=ROUNDS[index // len(LINES)], linewidth=2.4, markersize=6, zorder=4)
        styles[name] = dict(color=OURS) | look
    for index, name in enumerate(others):
        look = dict(color=OTHERS[index % len(OTHERS)], marker=MARKERS[index % len(MARKERS)])
        styles[name] = look | dict(linestyle="-", linewidth=1.4, markersize=5, zorder=3)
    return {name: style for name, style in styles.items() if name in names}


def _plot(axes, some, styles, point):
    """Draw a line for a provider; point(row) is (x, y)."""
    for provider, style in styles.items():
        points = [point(row) for row in some if row.provider == provider]
        axes.plot(*zip(*points, strict=True) if points else ([], []), **style, label=provider)


def _speed(timed, styles):
    panels = _kinds(timed)
    most = collections.Counter(mode for mode, _ in panels).most_common(1)[0][1]
    across, places = min(ACROSS, most), {}
    name, factor = unit(timed)

    def panel(mode, kind, axes):
        some = sorted(panels[mode, kind], key=lambda row: row.Sk)
        _plot(axes, some, styles, lambda row: (row.Sk, factor * row.tflops))
        lengths = sorted({row.Sk for row in some})
        axes.set_xscale("log", base=2)
        axes.set_xticks(_apart(lengths), [f"{x // 1024}k" if x % 1024 == 0 else f"{x}" for x in _apart(lengths)])
        axes.set_xticks([], minor=True)
        axes.set(xlim=(lengths[0] / 1.3, lengths[-1] * 1.3), ylim=(0, 1.1 * factor * max(row.tflops for row in some)))
        axes.set(title=_title(mode, kind), xlabel="sequence length", ylabel=name)

    for mode in dict.fromkeys(mode for mode, _ in panels):  # starts a line of panels
        start = math.ceil((max(places, default=-1) + 1) / across) * across
        keys = (key for key in panels if key[0] == mode)
        places |= {start + index: functools.partial(panel, *key) for index, key in enumerate(keys)}
    return places, across


def _roofline(timed, styles):
    from matplotlib.ticker import LogLocator, NullLocator

    panels = collections.defaultdict(list)
    for row in timed:
        panels[row.mode, row.dtype].append(row)
    name, factor = unit(timed)
    dots = {x: style | dict(linestyle="", alpha=0.8, markersize=style["markersize"] - 1) for x, style in styles.items()}

    def point(row):
        return 1e3 * row.tflops / row.gbps, factor * row.tflops  # operations a byte, as cost.py counts both

    def panel(mode, dtype, axes):
        some = panels[mode, dtype]
        _plot(axes, some, dots, point)
        xs, ys = zip(*map(point, some), strict=True)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlim=(min(xs) / 1.5, max(xs) * 1.5), ylim=(min(ys) / 2, max(ys) * 2))
        _ceilings(axes, some, name, factor)
        for axis, locator in ((axes.xaxis, LogLocator(base=2)), (axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0)))):
            axis.set_major_locator(locator)
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_locator(NullLocator())
        title = f"roofline: {_title(mode)}, {DTYPES.get(dtype, dtype)}"
        axes.set(title=title, xlabel="operations a byte", ylabel=name)

    places = {place: functools.partial(panel, *key) for place, key in enumerate(panels)}
    return places, min(ACROSS, len(panels))


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
    ys = [factor * min(products, memory * x) for x in xs]
    axes.plot(xs, ys, color=CEILING, linewidth=1.2, zorder=2, label="ceilings")
    style, above = dict(color=CEILING, fontsize=8, va="bottom"), 1.1 * factor * products
    axes.text(low, above, f" copy {1e3 * memory:,.4g} GB/s", ha="left", **style)  # no point lies above a slope
    axes.text(high, above, f"products {factor * products:,.4g} {name}", ha="right", **style)


def _kinds(timed):
    """{(mode, kind): rows}; the kind names the batch where two batches have the same length."""
    panels, alike = collections.defaultdict(list), collections.defaultdict(set)
    for row in timed:
        alike[kind(row.case)].add((row.Sk, row.case))
    for row in timed:
        some = alike[kind(row.case)]
        batch = row.B if len(some) > len(dict(some)) else 0
        panels[row.mode, kind(row.case)._replace(B=batch)].append(row)
    return panels


def _title(mode, kind=None):
    words = [mode.replace("_", " + ")]
    if kind:
        words += [DTYPES.get(kind.dtype, kind.dtype), f"d{kind.D}" if kind.D == kind.Dv else f"d{kind.D}-{kind.Dv}"]
        words += ["causal" if kind.causal else "full"]
        words += [f"gqa{kind.Hq // kind.Hkv}"] * (kind.Hq != kind.Hkv)
        words += [f"{kind.Sq} queries"] * (kind.Sq > 0) + [f"batch {kind.B}"] * (kind.B > 0) + kind.options.split()
    return textwrap.fill(", ".join(words), 40)  # letters that fit over a panel


def _apart(lengths):
    """The lengths that can stand beside each other on a logarithmic axis, the longest among them."""
    shown = lengths[-1:]
    for length in reversed(lengths):
        shown = [length, *shown] if shown[0] / length > 1.3 else shown
    return shown


# Figures of rows. speed: against length, a panel for a mode and kind of case, a line for a provider. roofline: against
# operations a byte, under the measured ceilings, a panel for a mode and dtype. draw: both.
speed, roofline = functools.partial(_figure, [_speed]), functools.partial(_figure, [_roofline])
draw = functools.partial(_figure, [_speed, _roofline])
