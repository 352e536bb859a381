"""From a call to a cache to its kernels: grids, tiles, and how many programs share the keys of a sequence."""

import math
from typing import Any

from triton import cdiv

from ..call.cached import Decode, room
from ..kernels.vocabulary.pages import Cache
from ..kernels.vocabulary.partials import Parts
from ..kernels.vocabulary.rotary import Rotary
from . import arguments as views, run, tiles


def _common(decode: Decode):
    """The arguments that kernels that know a cache share."""
    table = decode.table if room(decode) else None  # without room nothing is read
    cos, sin = decode.cos, decode.sin
    turned = cos is not None and sin is not None
    return dict(
        cache=Cache(*(views.of(x) for x in (decode.key_cache, decode.value_cache, decode.lengths)), _of(table)),
        rotary=Rotary(views.of(cos), views.of(sin)) if turned else None,
        capacity=room(decode),
        added=decode.added,
        pages=decode.key_cache.shape[0],
        positions=1 if cos is None else cos.shape[0],
        HEADS=decode.key_cache.shape[1],
        D=decode.key_cache.shape[3],
        DV=decode.value_cache.shape[3],
        TURNED=0 if cos is None else 2 * cos.shape[1],
        INTERLEAVED=decode.interleaved,
        PAGE=None if table is None or table.shape[1] == 1 else decode.key_cache.shape[2],
    )


def _of(tensor):
    return None if tensor is None else views.of(tensor)


def append(decode: Decode):
    """Write what is new into the caches."""
    new_key, new_value = decode.new_key, decode.new_value
    if new_key is None or new_value is None or not (new_key.shape[0] * new_key.shape[1] * decode.added * room(decode)):
        return
    batch, heads, added, _ = new_key.shape
    arguments = _common(decode) | dict(K=views.of(new_key), V=views.of(new_value))
    run.run_tiled("append", decode.call, lambda tile: cdiv(added, tile.rows) * batch * heads, arguments)


def _seen(decode: Decode):
    """The most keys that some query of a sequence sees."""
    call, rows = decode.call, decode.call.query.shape[2]
    if call.top_left:
        most = None if call.right is None else rows + call.right
    else:
        most = None if call.left is None else rows + call.left
    return room(decode) if most is None else min(most, room(decode))


def splits(decode: Decode, programs, tile):
    """How many programs share the keys of a block of rows; from shapes alone, so that a graph may be replayed."""
    many = None if run.interpreting() else run.multiprocessors(run.device_of(decode.call.query))
    return tiles.splits(programs, cdiv(_seen(decode), tile.keys), many)


def _rows_of_a_tile(decode: Decode) -> int:
    """Rows that read one kv head: those of all its query heads."""
    return decode.call.query.shape[2] * (decode.call.query.shape[1] // decode.key_cache.shape[1])


def failed(decode: Decode):
    """Why one of the kernels of a call to a cache is known not to run; None if none is."""
    reading = tiles.decoder(_rows_of_a_tile(decode)), "merge"
    return run.failed(decode.call, reading if decode.new_key is None else (*reading, "append"))


def attend(out, lse, decode: Decode):
    """Fill out, and lse unless it is empty."""
    call = decode.call
    batch, heads, rows, _ = call.query.shape
    kv_heads = decode.key_cache.shape[1]
    packed = _rows_of_a_tile(decode)
    band = views.band(call)
    common = dict(q_len=rows, left=band["left"], right=band["right"], TOP_LEFT=call.top_left)
    common |= dict(Q=views.of(call.query), GROUP=heads // kv_heads, PRECISION=views.precision(call.query.dtype))
    common |= dict(masks=views.masks(call.mask, call.key_mask, call.query_mask, *views.sizes(call)))
    common |= dict(score=views.scored(call), **_common(decode))
    results = dict(Out=views.of(out), Lse=lse if lse.numel() else None)
    merging: dict[str, Any] = {}

    def shares(tile):
        programs = cdiv(packed, tile.rows) * batch * kv_heads
        return programs, splits(decode, programs, tile)

    def targets(tile):
        _, n = shares(tile)
        merging.clear()  # what a larger tile, which did not fit, has left
        if n == 1:
            return dict(**results, parts=None, splits=1)
        sizes = (batch, heads, rows, n)
        merging["parts"] = Parts(*(out.new_empty((*sizes, last), dtype=lse.dtype) for last in (out.shape[3], 2)))
        merging["splits"] = n
        return dict(Out=None, Lse=None, **merging)

    run.run_tiled(tiles.decoder(packed), call, lambda tile: math.prod(shares(tile)), common, targets)
    if merging:
        sizes = dict(rows=rows, HEADS=heads, DV=out.shape[3], MOST=tiles.MOST_SPLITS, unit=common["score"].unit)
        run.run_tiled("merge", call, lambda tile: batch * heads * rows, results | merging | sizes)
