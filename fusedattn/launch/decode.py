"""Launches of the kernels of `attention_decode`: append, attention to splits of the keys, and combine."""

import functools
from typing import Any

from triton import cdiv

from ..call.decode import Decode, capacity_of, keys_hold_values
from ..kernels.vocabulary.columns import alike
from ..kernels.vocabulary.pages import Cache
from ..kernels.vocabulary.partials import Partials
from ..kernels.vocabulary.rotary import Rotary
from ..kernels.vocabulary.rules import Rules
from . import arguments, grids, run, tile_table


def _common(decode: Decode, **of_spec: Any):
    grids.check(decode.call, decode.added)
    (pages, heads, page, _), capacity = decode.key_cache.shape, capacity_of(decode)
    table = decode.table if capacity else None  # without capacity nothing is read
    cache = Cache(*map(arguments.of, (decode.key_cache, decode.value_cache, decode.lengths, table)))
    of_spec |= dict(INTERLEAVED=decode.interleaved, PAGE=None if table is None or table.shape[1] == 1 else page)
    rotary, positions = None, 1
    if (cos := decode.cos) is not None:
        rotary, positions = Rotary(arguments.of(cos), arguments.of(decode.sin)), cos.shape[0]
        of_spec |= dict(ROTARY_DIM=2 * cos.shape[1])
    numbers = dict(heads=heads, capacity=capacity, added=decode.added, pages=pages, positions=positions)
    return dict(cache=cache, rotary=rotary, spec=arguments.spec(decode.call, **of_spec)) | numbers


def launch_append(decode: Decode):
    batch, heads, added = decode.lengths.shape[0], decode.key_cache.shape[1], decode.added
    # Fix the fields that the kernel does not read, so that it is compiled only once.
    launched = _common(decode, GROUP=1, TOP_LEFT=False, PRECISION="ieee")
    launched |= dict(K=arguments.of(decode.new_key), V=arguments.of(decode.new_value))
    if batch * heads * added * launched["capacity"]:
        run.run_tiled("append", decode.call, lambda tile: cdiv(added, tile.rows) * batch * heads, launched)


def _rows_of_a_tile(decode: Decode) -> int:
    return decode.call.query.shape[2] * (decode.call.query.shape[1] // decode.key_cache.shape[1])


def decoder(rows):
    return next((name for name, most in tile_table.DECODE.items() if rows <= most), "decode_64")


@functools.lru_cache(maxsize=1024)  # a growing cache asks for the same numbers at many steps
def splits(programs, blocks, multiprocessors):
    """Return how many programs share the keys of a sequence, so that the GPU is full and the merge pays off."""
    # programs: the grid size before splitting. blocks: key blocks of the longest possible sequence. multiprocessors:
    # None in Triton's interpreter, which splits only to test the merge.
    # Source: the rule of FlashAttention-2, which counts each multiprocessor twice.
    if multiprocessors is None:
        return max(1, min(2, blocks))
    places = 2 * multiprocessors
    if programs >= 0.8 * places or blocks <= 4:
        return 1
    # Skip n splits if n - 1 splits have as few blocks each: n would finish no earlier.
    most = min(tile_table.MOST_SPLITS, places, blocks)
    useful = [n for n in range(1, most + 1) if n == 1 or -(-blocks // n) < -(-blocks // (n - 1))]

    def efficiency(n):
        return programs * n / (places * -(-programs * n // places))

    enough = 0.85 * max(map(efficiency, useful))
    return next(n for n in useful if efficiency(n) >= enough)


def new_partials(out, count: int, dtype) -> Partials:
    *planes, rows, columns = out.shape
    return Partials(*(out.new_empty((*planes, count, rows, last), dtype=dtype) for last in (columns, 2)))


def combine(call, launched: dict, scale, shape) -> None:
    """Merge the results of splits of the keys. launched: Out, Lse, Stats, partials, splits. shape: the output's."""
    batch, heads, rows, columns = shape
    sizes = dict(rows=rows, heads=heads, DV=columns, MOST=tile_table.MOST_SPLITS, scale=scale)
    run.run_tiled("combine", call, lambda tile: batch * heads * rows, dict(Stats=None) | launched | sizes)


def kernels(decode: Decode) -> tuple[str, ...]:
    return decoder(_rows_of_a_tile(decode)), "combine", *["append"] * (decode.new_key is not None)


def launch_decode(out, lse, decode: Decode):
    """Compute attention to caches into `out`, and its lse into `lse` unless that is empty."""
    call, rows = decode.call, _rows_of_a_tile(decode)
    (batch, _, length, _), kv_heads = call.query.shape, decode.key_cache.shape[1]
    launched = _common(decode, BY_THREADS=arguments.by_threads(decode.key_cache))
    launched |= dict(Q=arguments.of(call.query)) | arguments.band(call)
    rules = launched["rules"] = Rules(arguments.masks_of(call), arguments.scored(call), None)
    if keys_hold_values(decode) and alike.fn(decode.key_cache.shape[3], decode.value_cache.shape[3]):
        launched["cache"] = launched["cache"]._replace(V=None)
    del launched["k_len"]
    results = dict(Out=arguments.of(out), Lse=lse if lse.numel() else None)
    # Bound the number of keys that a query sees from shapes alone, so that CUDA graphs can replay the call.
    side, capacity = call.right if call.top_left else call.left, launched["capacity"]
    keys = capacity if side is None else min(length + side, capacity)
    multiprocessors = None if run.interpreting() else run.multiprocessors(run.device_of(call.query))
    partials: dict[str, Any] = {}

    def programs(tile):
        return cdiv(rows, tile.rows) * batch * kv_heads

    def targets(tile):
        n = splits(programs(tile), cdiv(keys, tile.keys), multiprocessors)
        partials.update(splits=n, partials=new_partials(out, n, lse.dtype) if n > 1 else None)
        return (results if n == 1 else dict(Out=None, Lse=None)) | partials

    run.run_tiled(decoder(rows), call, lambda tile: programs(tile) * partials["splits"], launched, targets)
    if partials["partials"] is not None:
        combine(call, results | partials, rules.score.softmax_scale, out.shape)
