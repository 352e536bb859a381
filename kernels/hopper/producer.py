"""The copying warp of the forward: it loads tiles by TMA, and writes notes for the multiplying warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary import masks as masking, pages as paging, span
from . import notes as noting, ring, schedule, visits
from .work import block_of_rows, extent, within_split


@gluon.jit
def _steps(work, band, first, plane, split, results, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (block of keys of a block of rows' first step, number of its steps, Lists of its tiles).

    Without tile lists the Lists are (), and the blocks go down from the first.
    """
    if work.tile_lists is None:
        last, count = extent(band, first, split, results, ROWS, BLOCK_N)
        return last, count, ()
    else:
        lists = visits.lists_of(work.tile_lists, plane, first // ROWS)
        begin, end = 0, lists.count
        if results.partials is not None:
            begin, end = within_split(begin, end, split, results.splits)
        some, masked = begin < end, lists.masked - begin
        start = gl.load(gl.where(masked > 0, lists.partial, lists.full) + begin).to(gl.int32)
        start = gl.where(some, start, gl.cdiv(band.keys, BLOCK_N))  # the block past the last key
        count, masked = gl.maximum(end - begin, 1), gl.where(some, masked, 1)
        return start, count, visits.Lists(count, masked, lists.partial + begin, lists.full + begin)


@gluon.jit
def _page(work, K, kv, block, PAGE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Load the page number of a block of keys, one step ahead; return () without caches."""
    if work.caches.lengths is None:
        return ()
    else:
        key = gl.maximum(block, 0) * BLOCK_N
        page = paging.number(work.caches, kv, key, key < work.band.keys, PAGE)
        last = (K.shape[1] - 2) // work.caches.pitch  # a ragged descriptor has one row more than its tensor
        return gl.minimum(gl.maximum(page, 0), last)


@gluon.jit
def _keys(caches, kv, band, block, page, PAGE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (plane, row) at which TMA finds a block of keys. In a cache each block is a packed sequence of its own."""
    if caches.lengths is None:
        return ring.of_keys(kv, band), block * BLOCK_N
    else:
        first = page * caches.pitch + paging.rows(block * BLOCK_N, PAGE)
        length = gl.minimum(gl.maximum(band.keys - block * BLOCK_N, 0), BLOCK_N)
        return span.Plane(kv.batch, kv.head, kv.index, ring.Ragged(first, length)), 0


@gluon.jit
def _begin(shared, step, K, Words, masks, keys, row, plane, band, lists, i, block, first, GROUPS: gl.constexpr):
    """Write the note of a step (block, masked or not, step count); load its keys and the mask words that it needs."""
    ROWS: gl.constexpr = shared.q.tiles.shape[-2]
    BLOCK_N: gl.constexpr = shared.k.tiles.shape[-2]
    TILES: gl.constexpr = shared.q.tiles.shape[0] // shared.q.ready.shape[0] if shared.v.tiles.shape[0] == 1 else 1
    ACROSS: gl.constexpr = BLOCK_N // masking.BLOCK
    masked, numbers = i < lists.masked if shared.notes is not None else (), ()
    if shared.words is not None:  # load their numbers before the wait for a free tile
        for n in gl.static_range(GROUPS * ACROSS):
            key = gl.where(masked, block * BLOCK_N + n % ACROSS * masking.BLOCK, band.keys)
            numbers += (masking.number(masks.bits, plane, first + n // ACROSS * ROWS, key, band),)
    if shared.notes is not None:
        noting.write(shared.notes, shared.k, step * TILES, step, block, masked, lists.count)
        if masks.keys is not None:
            cols = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [1], [0]))
            real = masking.real_keys(masks, plane, cols, gl.where(masked, band.keys, 0))
            ring.slot(shared.notes.real, step).store(real.to(gl.int8))
    PARTS: gl.constexpr = shared.k.tiles.shape[0] // shared.k.ready.shape[0]
    NBYTES: gl.constexpr = PARTS * K.block_type.nbytes
    noting.reserve(shared.notes, shared.words, Words, shared.k, step * TILES, step, masked, numbers, NBYTES)
    ring.copy(shared.k, shared.k.tiles, step * TILES, K, keys, row)
    for i in gl.static_range(1, TILES):
        ring.fill(shared.k, step * TILES + i, K, keys, row, i * K.block_type.shape[-1])


@gluon.jit
def _pass_on(shared, step, lists, i):
    """Pass the values of step i on to the multiplying warps, with hidden values set to 0."""
    if shared.landed is not None:
        ring.pass_on(shared.landed, shared.v, step, i < lists.masked, ring.slot(shared.notes.real, step))


@gluon.jit
def _fill_bias(shared, step, Bias, plane, first, block, GROUPS: gl.constexpr):
    """Load each warpgroup's tile of the bias, if its ring exists."""
    if shared.bias is not None:
        ROWS: gl.constexpr = shared.q.tiles.shape[-2]
        column = block * shared.k.tiles.shape[-2]
        for g in gl.static_range(GROUPS):
            ring.fill_bias(shared.bias, step * GROUPS + g, Bias, plane, first + g * ROWS, column)


@gluon.jit
def produce(shared, results, Q, K, V, Bias, Words, work, rules, spec: gl.constexpr):
    """Load tiles by TMA: the work of one warp. Without tile lists it goes from the last keys to the first."""
    GROUPS: gl.constexpr = spec.WARPGROUPS
    PAGE: gl.constexpr = spec.PAGE
    ROWS: gl.constexpr = shared.q.tiles.shape[-2]
    BLOCK_N: gl.constexpr = shared.k.tiles.shape[-2]
    WIDTH: gl.constexpr = shared.v.tiles.shape[-1]
    ACROSS: gl.constexpr = (spec.DV + WIDTH - 1) // WIDTH
    # With one tile of v, load the next k before v, because the tile of v becomes free later.
    K_FIRST: gl.constexpr = shared.v.tiles.shape[0] == 1
    v = shared.v if shared.landed is None else shared.landed
    step = 0
    for n in range(schedule.share(work.order, gl.program_id(0), gl.num_programs(0))):
        first, plane, band, split, part = block_of_rows(work, n, results, GROUPS * ROWS, WIDTH, spec)
        column = 0 if ACROSS == 1 else part * WIDTH
        start, count, lists = _steps(work, band, first, plane, split, results, GROUPS * ROWS, BLOCK_N)
        block, ahead = start, visits.entry(lists, 1)
        kv = span.kv_head(plane, spec.GROUP)
        page = _page(work, K, kv, block, PAGE, BLOCK_N)
        keys, row = _keys(work.caches, kv, band, block, page, PAGE, BLOCK_N)
        page = _page(work, K, kv, block - 1, PAGE, BLOCK_N)
        # Load k first: its tile is free before the tile of q.
        _begin(shared, step, K, Words, rules.masks, keys, row, plane, band, lists, 0, block, first, GROUPS)
        for g in gl.static_range(GROUPS):
            ring.fill(shared.q, n * GROUPS + g, Q, ring.of_rows(plane, band), first + g * ROWS)
        _fill_bias(shared, step, Bias, plane, first, block, GROUPS)
        if not K_FIRST:
            ring.fill(v, step, V, keys, row, column)
        step += 1
        for i in range(1, count):
            if K_FIRST:
                before = keys, row
                if i > 1:
                    _pass_on(shared, step - 2, lists, i - 2)
            block = start - i if len(lists) == 0 else ahead.to(gl.int32)
            ahead = visits.entry(lists, i + 1)
            keys, row = _keys(work.caches, kv, band, block, page, PAGE, BLOCK_N)
            page = _page(work, K, kv, block - 1, PAGE, BLOCK_N)
            _begin(shared, step, K, Words, rules.masks, keys, row, plane, band, lists, i, block, first, GROUPS)
            _fill_bias(shared, step, Bias, plane, first, block, GROUPS)
            if K_FIRST:
                ring.fill(v, step - 1, V, before[0], before[1], column)
            else:
                _pass_on(shared, step - 1, lists, i - 1)
                ring.fill(v, step, V, keys, row, column)
            step += 1
        if K_FIRST:
            if count > 1:
                _pass_on(shared, step - 2, lists, count - 2)
            ring.fill(v, step - 1, V, keys, row, column)
        _pass_on(shared, step - 1, lists, count - 1)
