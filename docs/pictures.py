"""Draws the query-key pairs that masks leave visible: a cell is coloured if its attention weight is not 0."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import fusedattn as fa
from fusedattn.distributed import shards

CELL, GAP, AXIS, TOP, LETTER = 22, 34, 34, 56, 8  # pixels
SEEN, HIDDEN, INK = "#4051b5", "#e8e8ee", "#777777"  # INK is legible on white and on black


class Panel(NamedTuple):
    """Grid of queries (rows) and keys (columns) in a picture; `shades` is 0 for a hidden pair, and at most 1."""

    title: str
    shades: torch.Tensor
    rows: str = "query"
    columns: str = "key"


def weights(rows: int, keys: int, **options: Any) -> torch.Tensor:
    """Return attention weights (rows, keys) for equal scores, divided by the largest weight."""
    query, key = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, keys, 1)
    _, found = fa.attention(query, key, key, **options, return_weights=True, backend="naive")
    return found[0, 0] / found.max()


def svg(draw: Callable[..., Iterator[Panel]], *arguments: Any) -> str:
    """Return a picture of the panels draw(*arguments), side by side."""
    panels, drawn, left = [*draw(*arguments)], [], 2
    for title, shades, row_name, column_name in panels:
        rows, columns = shades.shape
        texts = [(0, 14, "start", title), (AXIS, TOP - 20, "start", column_name)]
        texts += [(AXIS + CELL * (j + 0.5), TOP - 5, "middle", j) for j in range(columns)]
        texts += [(AXIS - 8, TOP + CELL * (i + 0.5) + 4, "middle", i) for i in range(rows)]
        drawn.append(f'<g transform="translate({left} 0)">')
        drawn += [f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>' for x, y, anchor, text in texts]
        drawn.append(f'<text transform="translate(10 {TOP + 6}) rotate(-90)" text-anchor="end">{row_name}</text>')
        for i, j in itertools.product(range(rows), range(columns)):
            shade, place = shades[i, j].item(), f'x="{AXIS + CELL * j}" y="{TOP + CELL * i}"'
            fill = f'fill="{SEEN}" fill-opacity="{shade:.2f}"' if shade else f'fill="{HIDDEN}"'
            drawn.append(f'<rect {place} width="{CELL - 1}" height="{CELL - 1}" {fill}/>')
        drawn.append("</g>")
        left += max(AXIS + CELL * columns, LETTER * len(title), AXIS + LETTER * len(column_name)) + GAP
    width, height = left - GAP + 2, TOP + CELL * max(len(panel.shades) for panel in panels) + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    style = f"<style>text{{font:12px sans-serif;fill:{INK}}} g>text:first-child{{font-weight:600}}</style>"
    return "\n".join((head, style, *drawn, "</svg>", ""))


def _bias() -> Iterator[Panel]:
    far = torch.zeros(1, 1, 5, 5)
    far[..., 0], far[..., 4] = -1.0, float("-inf")
    yield Panel("alibi_slopes, causal", weights(5, 5, alibi_slopes=torch.tensor([0.5]), causal=True))
    yield Panel("bias", weights(5, 5, bias=far))


def _packed() -> Iterator[Panel]:
    starts, x = torch.tensor([0, 3, 5, 9], dtype=torch.int32), torch.zeros(9, 1, 1)
    options = dict(return_weights=True, max_seqlen_q=4, max_seqlen_k=4, backend="naive")
    for causal in (False, True):
        _, found = fa.attention_varlen(x, x, x, starts, starts, causal=causal, **options)
        shades = torch.zeros(9, 9)
        for first, last in itertools.pairwise(starts.tolist()):
            shades[first:last, first:last] = found[0, first:last, : last - first]
        yield Panel(f"attention_varlen{', causal' if causal else ''}", (shades > 0).float())


def _cache() -> Iterator[Panel]:
    cache, filled = torch.zeros(1, 1, 8, 1), torch.tensor([6], dtype=torch.int32)
    options = dict(cache_seqlens=filled, causal=True, return_weights=True, backend="naive")
    for title, rows in (("1 query", 1), ("3 queries", 3)):
        _, found = fa.attention_decode(torch.zeros(1, 1, rows, 1), cache, cache, **options)
        yield Panel(f"{title}, 6 of 8 keys", (found[0, 0] > 0).float())


def _heads() -> Iterator[Panel]:
    """Draw the key head that each of 8 query heads reads: values are unit vectors, so the output shows the key head."""
    for title, groups in (("8 key heads", 8), ("2 key heads", 2), ("1 key head", 1)):
        value = torch.eye(groups)[None, :, None, :]  # (1, Hkv, 1, Dv)
        out = fa.attention(torch.zeros(1, 8, 1, 1), torch.zeros(1, groups, 1, 1), value, backend="naive")
        yield Panel(title, out[0, :, 0], rows="query head", columns="key head")


def _shards() -> Iterator[Panel]:
    for title, balance in (("balance=None", None), ('balance="zigzag"', "zigzag")):
        shades = torch.zeros(4, 16)
        for rank, own in enumerate(shards.chunks(16, 4, balance)):
            for chunk in own:
                shades[rank, chunk.first : chunk.last] = 1.0
        yield Panel(title, shades, rows="rank", columns="row")


def _visible(panels: dict[str, tuple]) -> Iterator[Panel]:
    """Draw the visible pairs of each panel in {title: (rows, keys, options of attention)}."""
    for title, (*sizes, options) in panels.items():
        yield Panel(title, (weights(*sizes, **options) > 0).float())


_REAL, _DIAGONALS = torch.tensor([True] * 3 + [False] * 2), torch.eye(5, dtype=torch.bool)
_DIAGONALS = _DIAGONALS | _DIAGONALS.flip(1)
_BAND = dict(causal=True, window=(2, None))
_VISIBLE = {
    "causal": {"no mask": (5, 5, {}), "causal=True": (5, 5, dict(causal=True))},
    "align": {
        f'align="{align}", {rows} x {keys}': (rows, keys, dict(causal=True, align=align))
        for rows, keys in ((3, 6), (6, 3))
        for align in ("bottom_right", "top_left")
    },
    "window": {f"window={window}": (6, 6, dict(window=window)) for window in ((1, 1), (2, 0), (None, 1), (1, None))},
    "window_causal": {"causal=True, window=(2, None)": (6, 6, _BAND), "the same, 3 rows": (3, 6, _BAND)},
    "masks": {
        "key_mask": (5, 5, dict(key_mask=_REAL)),
        "query_mask": (5, 5, dict(query_mask=_REAL)),
        "mask": (5, 5, dict(mask=_DIAGONALS)),
        "mask and causal": (5, 5, dict(mask=_DIAGONALS, causal=True)),
    },
}
PICTURES = {name: functools.partial(svg, _visible, panels) for name, panels in _VISIBLE.items()}
PICTURES |= {draw.__name__[1:]: functools.partial(svg, draw) for draw in (_bias, _packed, _cache, _heads, _shards)}


def on_files(files, config):
    """Add the pictures to the files of the site; mkdocs calls this."""
    from mkdocs.structure.files import File

    for name, draw in PICTURES.items():
        files.append(File.generated(config, f"images/{name}.svg", content=draw()))
    return files
