"""Plots of attention weights, positional encodings and plans, by matplotlib without pyplot."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call import bits
from .call.checks import check_bool, check_number, check_place, fail
from .call.options import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNS = str.maketrans({" ": "\u00b7", "\n": "\u21b5", "\t": "\u2192"})  # white space made visible
HIDDEN = "#f0f0f0"
SMALL, LARGE = 5.0, 9.0  # font sizes of names, in points
LETTER = 0.6 * LARGE / 72  # the width of a letter, in inches
BAR: dict[str, Any] = dict(fraction=0.025, aspect=50, pad=0.015)  # size and place of a colour bar


def attention_map(
    weights: Tensor, tokens: Sequence[object] | None = None, key_tokens: Sequence[object] | None = None, *,
    mask: Tensor | None = None, titles: Sequence[str] | None = None, label: str = "attention weight",
    top: float | None = None, figure: Any = None,
) -> "Figure":  # fmt: skip
    """Draw attention weights: a panel for each head, with a row for each query and a column for each key.

    Examples:
        >>> layer, x = fusedattn.MultiHeadAttention(64, 4), torch.randn(1, 4, 64)
        >>> _, weights = layer(x, need_weights=True)
        >>> fusedattn.plot.attention_map(weights[0], "what it attends to".split()).savefig("heads.png")

    Args:
        weights: (Sq, Sk), (H, Sq, Sk) or (1, H, Sq, Sk), real, 0 or more. NaN is drawn as hidden.
        tokens: names of the Sq rows; a string gives each row a letter.
        key_tokens: names of the Sk columns, by default `tokens` if Sk = Sq. Rows and columns without names are
            numbered. Names that do not fit are left out.
        mask: bool, broadcastable to weights, True = may attend. Hidden pairs are grey; a weight of 0 is white.
        titles: one for each head, by default "head 1" and so on, and none for one head.
        label: text of the colour bar.
        top: weight of the darkest colour, by default the largest weight. A quarter of it is half as dark.
        figure: a matplotlib Figure or SubFigure to draw in, by default a new one.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, TypeError: an argument is wrong.
    """
    maps = _maps(weights, mask)
    heads, rows, columns = maps.shape
    row_names, key_names = _names("tokens", tokens, rows), _names("key_tokens", key_tokens, columns)
    key_names = row_names if key_tokens is None and rows == columns else key_names
    numbered = [f"head {head + 1}" for head in range(heads)] if heads > 1 else [""]
    titles = _names("titles", titles, heads, signs={}) or numbered
    if not isinstance(label, str):
        fail(TypeError, "label", "a string", type(label).__name__)
    top = maps.nan_to_num(0.0).max().item() or 1.0 if top is None else top
    check_number("top", top, "a finite number above 0", positive=True)
    matplotlib = _matplotlib(figure)

    across = math.ceil(math.sqrt(heads))
    down = math.ceil(heads / across)
    beside, below = (max(map(len, names or ["000"])) * LETTER for names in (row_names, key_names))
    if figure is None:
        longest, widest = max(rows, columns), max(2.0, min(7.0, 16.0 / across))  # a panel is 2 to `widest` inches wide
        cell = min(max(0.15, 2.0 / longest), widest / longest)
        size = across * (columns * cell + beside + 0.3) + 0.9, down * (rows * cell + below + 0.5)
        figure = matplotlib.figure.Figure(figsize=(max(size[0], 3.0), max(size[1], 2.4)), layout="constrained")
    width, height = figure.bbox.width / figure.dpi, figure.bbox.height / figure.dpi
    cell = min(((width - 0.9) / across - beside - 0.3) / columns, (height / down - below - 0.5) / rows)

    colors = matplotlib.colormaps["Blues"].with_extremes(bad=HIDDEN)
    norm = matplotlib.colors.PowerNorm(0.5, 0.0, top)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[heads:]:
        axes.remove()
    for axes, head, title in zip(panels, maps, titles, strict=False):
        image = axes.imshow(head.numpy(), cmap=colors, norm=norm, interpolation="nearest")
        _write(axes.xaxis, key_names, cell, rotation=90 if below > LETTER else 0)
        _write(axes.yaxis, row_names, cell)
        axes.set_title(title, fontsize=11, pad=4)
    figure.colorbar(image, ax=panels[:heads], label=label, ticks=matplotlib.ticker.MaxNLocator(4), **BAR)
    return figure  # type: ignore[no-any-return]


def positional_encoding(pe: Tensor, *, figure: Any = None) -> "Figure":
    """Draw a positional encoding, with a row for each position and a column for each dimension.

    Examples:
        >>> layer = fusedattn.layers.SinusoidalPositionalEncoding(64, 100)
        >>> fusedattn.plot.positional_encoding(layer.pe).savefig("positions.png")

    Args:
        pe: (S, E) or (1, S, E), real and finite.
        figure: a matplotlib Figure or SubFigure to draw in, by default a new one.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, TypeError: pe is wrong.
    """
    table = _values("pe", pe)
    table = table[0] if table.dim() == 3 and len(table) == 1 else table
    if table.dim() != 2 or not table.numel():
        fail(ValueError, "pe", "shape (S, E) or (1, S, E), without 0", table.shape)
    if not table.isfinite().all():
        fail(ValueError, "pe", "finite numbers", "NaN or infinity")
    matplotlib = _matplotlib(figure)
    figure = matplotlib.figure.Figure(figsize=(7.0, 4.5), layout="constrained") if figure is None else figure
    axes, most = figure.subplots(), table.abs().max().item() or 1.0
    image = axes.imshow(table.numpy(), cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    _write(axes.xaxis, None, 0.0)
    _write(axes.yaxis, None, 0.0)
    axes.set(xlabel="dimension", ylabel="position")
    figure.colorbar(image, ax=axes, label="value", **BAR)
    return figure  # type: ignore[no-any-return]


def plan(plan: Plan, *, figure: Any = None) -> "Figure":
    """Draw the blocks of a plan: empty ones grey, full ones dark, others pale. A panel for each head of each batch.

    Examples:
        >>> plan = fusedattn.plan(fusedattn.masks.sliding_window(500, 0), rows=4096, keys=4096)
        >>> fusedattn.plot.plan(plan).savefig("plan.png")

    Args:
        plan: from `fusedattn.plan`, with a mask of pairs.
        figure: a matplotlib Figure or SubFigure to draw in, by default a new one.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError, TypeError: an argument is wrong.
    """
    if not isinstance(plan, Plan):
        fail(TypeError, "plan", "a fusedattn.plan", type(plan).__name__)
    if plan.block_mask is None or plan.mask_bits is None:
        fail(ValueError, "plan", "one with a mask of pairs", "token masks alone")
    if 0 in plan.block_mask.shape:
        fail(ValueError, "plan", "a shape without 0", f"shape {tuple(plan.shape)}")
    marks, size = plan.block_mask.flatten(0, 1), plan.mask_bits.shape[1]
    batch, heads = plan.block_mask.shape[:2]
    of_batches = [f"batch {b + 1}" + f", head {h + 1}" * (heads > 1) for b in range(batch) for h in range(heads)]
    titles, label = of_batches if batch > 1 else None, f"blocks of {size} x {size}"
    shown = torch.where(marks == bits.FULL, 1.0, 0.25)
    return attention_map(shown, mask=marks != bits.EMPTY, titles=titles, label=label, top=1.0, figure=figure)


def _matplotlib(figure: Any) -> Any:
    try:
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError as error:
        raise ImportError("matplotlib is not installed: pip install 'fusedattn[plot]'") from error
    if figure is not None and not isinstance(figure, matplotlib.figure.FigureBase):
        fail(TypeError, "figure", "a matplotlib Figure or SubFigure", type(figure).__name__)
    return matplotlib


def _values(name: str, tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    check_place(name, tensor)
    if tensor.is_complex() or tensor.is_quantized:
        fail(TypeError, name, "real numbers", tensor.dtype)
    if tensor.is_meta:
        fail(ValueError, name, "a tensor with values", "one on meta")
    return tensor.detach().cpu().to(dtype)


def _maps(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Return weights as float64 (H, Sq, Sk), with NaN for hidden pairs."""
    maps = _values("weights", weights)
    maps = maps[None] if maps.dim() == 2 else maps[0] if maps.dim() == 4 and len(maps) == 1 else maps
    if maps.dim() != 3 or not maps.numel():
        got = f"shape {tuple(weights.shape)}: pass weights[0] of a batch"
        fail(ValueError, "weights", "shape (Sq, Sk), (H, Sq, Sk) or (1, H, Sq, Sk), without 0", got)
    low, high = maps.nan_to_num(0.0, math.inf, -math.inf).aminmax()
    if low < 0 or high == math.inf:
        fail(ValueError, "weights", "finite numbers, 0 or more", f"{low:.3g} to {high:.3g}")
    if mask is None:
        return maps
    check_bool("mask", mask, None)
    seen = _values("mask", mask, torch.bool)
    try:
        return maps.masked_fill(~seen, math.nan).view_as(maps)
    except RuntimeError:
        fail(ValueError, "mask", f"a shape that broadcasts to that of weights, {tuple(maps.shape)}", mask.shape)


def _names(
    argument: str, names: Sequence[object] | None, length: int, signs: dict[int, str] = SIGNS
) -> list[str] | None:
    if names is None:
        return None
    try:
        written = [str(name).translate(signs) for name in names]
    except TypeError:
        fail(TypeError, argument, "a sequence of names", type(names).__name__)
    if len(written) != length:
        fail(ValueError, argument, f"{length} names", len(written))
    return written


def _write(axis: Any, names: list[str] | None, cell: float, rotation: int = 0) -> None:
    """Write names along an axis, in cells of `cell` inches."""
    if names is None:
        axis.get_major_locator().set_params(integer=True)
        axis.set_tick_params(labelsize=LARGE)
        return
    points = max(cell * 72, 0.1)
    every = math.ceil(SMALL / points)
    # matplotlib would read two dollar signs in a token as a formula.
    style: dict[str, Any] = dict(fontfamily="monospace", parse_math=False, rotation=rotation)
    style["fontsize"] = min(max(points, SMALL), LARGE)
    axis.set_ticks(range(0, len(names), every), names[::every], **style)
    axis.set_tick_params(length=0, pad=2)
