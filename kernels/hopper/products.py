"""Products with stored gradients of scores: dq and dk. For heads wider than 256 also dv, from stored weights."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait, tensor_descriptor

from ..vocabulary import memory, span
from . import layouts, ring, schedule, visits
from .copies import async_store, fence_async_shared
from .layouts import WARPS


class Form(NamedTuple):
    """Compile-time constants of `grad_product`: GROUP query heads per kv head; COLUMNS of the gradient.

    A block sums MEMBERS query heads. ACROSS programs split its columns. OF_K: its rows are keys. TOP_LEFT aligns row 0
    with key 0, not the last ones. STAGES: tiles of each factor. REGISTERS: (per multiplying thread, per other one).
    """

    GROUP: int
    MEMBERS: int
    COLUMNS: int
    ACROSS: int
    OF_K: bool
    TOP_LEFT: bool
    STAGES: int
    REGISTERS: tuple


class Factors(NamedTuple):
    """Shared memory of `grad_product`: rings of ds and of products. others: right factors, guarded by ds' barriers."""

    ds: ring.Ring
    others: gl.shared_memory_descriptor
    product: ring.Ring


@gluon.jit
def _share(work):
    if work.sequences is None:
        return schedule.share(work.order, gl.program_id(0), gl.num_programs(0))
    else:
        return gl.minimum(gl.num_programs(0), 1)  # 1; if ptxas knew that, it would serialise products


@gluon.jit
def _factors_of(work, n, factors, form: gl.constexpr):
    """Return (first row, batch and head, Band, begin, end, Lists, first column) of a program's n-th block.

    Without Lists the block uses ds tiles [begin, end). If OF_K, rows are keys: the Band is flipped.
    """
    TILE: gl.constexpr = factors.product.tiles.shape[0] * factors.product.tiles.shape[-2]
    PARTS: gl.constexpr = TILE // factors.others.shape[-2]
    first, plane, band = visits.take(work, n, form.TOP_LEFT, TILE, form.OF_K)
    if form.OF_K:
        band = span.flip(band)
    begin, end = visits.stored_blocks(band, first, TILE)
    column = 0
    if form.ACROSS > 1:
        column, plane = plane.index % form.ACROSS * factors.others.shape[-1], span.kv_head(plane, form.ACROSS)
    lists = visits.lists_of(work.tile_lists, plane, first // TILE)
    return first, plane, band, begin * PARTS, end * PARTS, lists, column


@gluon.jit
def _of_product(plane, band, OF_K: gl.constexpr):
    """Return the Plane that `ring.place` needs for rows of dq, or of dk if OF_K. The Band is from `_factors_of`."""
    return ring.of_keys(plane, span.flip(band)) if OF_K else ring.of_rows(plane, band)


@gluon.jit
def _load(factors, GradScores, Others, work, before, form: gl.constexpr):
    """Load by TMA the tiles that `_multiply` multiplies: the work of one warp.

    For dq these are ds and keys of one head. For dk they are ds and queries of all query heads that share a kv head.
    """
    DEPTH: gl.constexpr = Others.block_type.shape[-2]
    TILE: gl.constexpr = factors.product.tiles.shape[0] * factors.product.tiles.shape[-2]
    GROUP: gl.constexpr = form.GROUP
    OF_K: gl.constexpr = form.OF_K
    step = 0
    for n in range(_share(work)):
        first, plane, band, begin, end, lists, column = _factors_of(work, n, factors, form)
        key = visits.first_key(plane, TILE)
        block, member, ahead = begin, begin * 0, visits.entry(lists, 0)
        for i in range(visits.steps(begin, end, lists, form.MEMBERS, TILE // DEPTH)):
            block, member, ahead = visits.listed(lists, i, block, member, ahead, TILE // DEPTH)
            ring.reserve(factors.ds, step, GradScores.block_type.nbytes + Others.block_type.nbytes)
            head = span.query_head(plane, member, GROUP) if OF_K else plane
            here = span.Plane(visits.head(head, before * GROUP), 0, 0, ())
            down, across = (first, block * DEPTH) if OF_K else (block * DEPTH, first)
            ring.copy(factors.ds, factors.ds.tiles, step, GradScores, here, key + down, across)
            other = _of_product(head if OF_K else span.kv_head(plane, GROUP), span.flip(band), not OF_K)
            ring.copy(factors.ds, factors.others, step, Others, other, block * DEPTH, column)
            block, member = visits.following(block, member, begin, end, form.MEMBERS)
            step += 1


@gluon.jit
def _store_product(g: gl.constexpr, factors, Product, work, form: gl.constexpr):
    """Store the blocks of dq or dk of warpgroup g, each while the next is computed: the work of one warp."""
    ROWS: gl.constexpr = factors.product.tiles.shape[-2]
    if isinstance(Product, tensor_descriptor):
        for n in range(_share(work)):
            first, plane, band, _, _, _, column = _factors_of(work, n, factors, form)
            ring.wait(factors.product, 2 * n + g)
            place = ring.place(_of_product(plane, band, form.OF_K), first + g * ROWS, column)
            async_store(Product, place, factors.product.tiles.index(g))
            store_wait(0)
            ring.release(factors.product, 2 * n + g)


@gluon.jit
def _multiply(g: gl.constexpr, factors, Product, work, scale, form: gl.constexpr):
    """Compute half g (0 or 1) of the rows of each block of dq or dk: the work of one warpgroup."""
    ROWS: gl.constexpr = factors.product.tiles.shape[-2]
    WIDTH: gl.constexpr = factors.product.tiles.shape[-1]
    # If the last 64 of 256 columns are past the end, two products, of 128 and 64 columns, leave them out.
    FEWER: gl.constexpr = WIDTH == 256 and form.COLUMNS <= 192
    MAIN: gl.constexpr = 128 if FEWER else WIDTH
    dtype: gl.constexpr = factors.product.tiles.dtype
    step = 0
    for n in range(_share(work)):
        first, plane, band, begin, end, lists, column = _factors_of(work, n, factors, form)
        total, rest = layouts.zeros(ROWS, MAIN), ()
        if FEWER:
            rest = layouts.zeros(ROWS, 64)
        steps = visits.steps(begin, end, lists, form.MEMBERS, 2 * ROWS // factors.others.shape[-2])
        for i in range(steps):
            ring.wait(factors.ds, step)
            if form.OF_K:
                ds = ring.tile(factors.ds, step).slice(g * ROWS, ROWS, dim=0)
            else:
                ds = ring.tile(factors.ds, step).slice(g * ROWS, ROWS, dim=1).permute((1, 0))
            others = ring.at(factors.others, step)
            total = warpgroup_mma(ds, others.slice(0, MAIN, dim=1), total, is_async=True)
            if FEWER:
                rest = warpgroup_mma(ds, others.slice(128, 64, dim=1), rest, is_async=True)
                total, rest = warpgroup_mma_wait(num_outstanding=2, deps=(total, rest))
            else:
                total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            ring.release(factors.ds, step - 1, pred=i > 0)
            step += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        if FEWER:
            rest = warpgroup_mma_wait(num_outstanding=0, deps=(rest,))
        ring.release(factors.ds, step - 1, pred=steps > 0)
        at = 2 * n + g
        if not isinstance(Product, tensor_descriptor):
            m = memory.of_keys(Product, plane) if form.OF_K else memory.of_rows(Product, plane)
            layouts.store_wide(m, first + g * ROWS, band.rows, total * scale, form.COLUMNS, column)
            if FEWER:
                layouts.store_wide(m, first + g * ROWS, band.rows, rest * scale, form.COLUMNS, 128)
        elif FEWER:
            ring.claim(factors.product, at)
            tile = ring.tile(factors.product, at)
            tile.slice(0, MAIN, dim=1).store((total * scale).to(dtype))
            tile.slice(128, 64, dim=1).store((rest * scale).to(dtype))
            fence_async_shared()
            mbarrier.arrive(ring.slot(factors.product.ready, at), count=1)
        else:
            ring.put(factors.product, at, (total * scale).to(dtype))


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "planes", "section", "before"])
def grad_product(
    GradScores, Others, Product,
    sequences, tile_lists, q_len, k_len, left, right, scale, heads, planes, section, before,
    form: gl.constexpr,
):  # fmt: skip
    """Write Product: dq = ds @ keys, where Others is K; or, if OF_K, dk = ds.T @ queries, where Others is Q.

    If OF_K, GradScores may hold weights p and Others grad_out; Product is then dv = p.T @ grad_out. heads counts heads
    of Product; planes and section count them times ACROSS; before counts kv planes. Other arguments: see
    `stored_backward`. Blocks have 64 rows. Columns (rows if OF_K) of a block of GradScores are 128 rows of Product. A
    program takes two blocks of Product at a time. tile_lists are by its rows. A float32 Product is a View.
    """
    STAGES: gl.constexpr = form.STAGES
    TILE: gl.constexpr = 2 * Others.block_type.shape[-2]
    length = k_len if form.OF_K else q_len
    band = span.band(q_len, k_len, left, right, form.TOP_LEFT)
    order = schedule.Schedule(gl.cdiv(length, TILE), planes, section, 0)
    before_them = before * (form.GROUP // form.MEMBERS) * form.ACROSS
    work = visits.Work(order, before_them, heads * form.ACROSS, band, sequences, tile_lists, left, right)
    ds = ring.ring(GradScores, STAGES, 2)
    others = gl.allocate_shared_memory(Others.dtype, [STAGES] + Others.block_type.shape, Others.layout)
    factors = Factors(ds, others, ring.ring(Others, 2, 1))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, factors, Product, work, scale, form)),
            (_multiply, (1, factors, Product, work, scale, form)),
            (_load, (factors, GradScores, Others, work, before, form)),
            (_store_product, (0, factors, Product, work, form)),
            (_store_product, (1, factors, Product, work, form)),
        ],
        [WARPS, 1, 1, 1],
        [form.REGISTERS[0], form.REGISTERS[1], form.REGISTERS[1], form.REGISTERS[1]],
    )
