"""Tile sizes by kernel and GPU, and the functions that look them up.

Table rows were chosen offline, by registers and spills in compiled code (`make compile`). A timed row names its GPU.
Form: a Tile, or a Pipeline or Backward of a Hopper kernel. Band: a causal mask or a window. Pressure: see `tiles_for`.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Block size, warps and stages of a program, and the bytes it may spill. `make compile` fails if it spills more.

    bulk adds tiles of dq to memory by TMA, for compute capability 9.0 and later.
    """

    rows: int
    keys: int | None
    warps: int
    stages: int
    spills: int = 0
    bulk: bool = False


class Pipeline(NamedTuple):
    """Tile of the Hopper forward, which may not spill registers.

    warpgroups: how many run wgmma, WARPGROUP_ROWS rows each. stages: blocks of keys, and of values, in shared memory.
    """

    warpgroups: int
    keys: int
    stages: int

    @property
    def rows(self):
        return self.warpgroups * WARPGROUP_ROWS


class Backward(NamedTuple):
    """Tile of a Hopper backward: two warpgroups multiply, WARPGROUP_ROWS keys each.

    rows: size of the query blocks that its loop visits. stages: query blocks in shared memory; for STORED kernels,
    the stages of the PRODUCTS kernels that follow.
    """

    rows: int
    stages: int

    @property
    def warpgroups(self):
        return 2

    @property
    def keys(self):
        return self.warpgroups * WARPGROUP_ROWS


def same(form):
    """Return a Tile with its allowed spills set to 0, and anything else unchanged."""
    return form._replace(spills=0) if isinstance(form, Tile) else form


WARPGROUP_ROWS = 64
MULTIPROCESSORS = 132  # of an H100 or H200; the number of each GPU that `explain` assumes
# {number of multiplying warpgroups: registers per thread (at launch, of multiplying warps, of copying warps)}. If the
# warps together need more than all had at launch, setmaxnreg waits for ever.
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 24)}
CLEANING_REGISTERS = {2: (168, 232, 40), 3: (128, 160, 32)}  # with a mask of keys or pairs the copying warp needs more
TILE_BYTES = 231424  # shared memory for tiles of a Hopper kernel; barriers and small data take the rest
BIASED_BYTES = 230400  # the same for a forward with a bias
FEW_ROWS = 64  # calls with at most this many rows use tiles of at most 64 x 64; limit of `pack_gqa` outside of Hopper
PREFILL_ROWS = 128  # calls to caches with at least this many queries a sequence may run the Hopper forward
COPIED_LENGTH = 2048  # minimum rows, and keys seen by a row, of calls whose tensors are copied if TMA cannot read them
L2_BYTES = 32 << 20  # limit on keys and values of the heads that are scheduled together
# The same limit for queries and incoming gradients in STORED kernels. PRODUCTS kernels use half of it. Without a limit
# the backward takes 1.25 times as long at 1024 tokens, and 1.17 times at 2048, on an H200.
SECTION_BYTES = 16 << 20
# Limits by width, without and with a band: a program takes several blocks of rows if a row sees at most this many keys.
# With more keys, one block per program was 0.98 to 1.04 times as fast on an H200 (bench/NOTES.md).
SHARED_KEYS = {128: 16384}
SHARED_KEYS_OF_BANDS = {64: 4096, 128: 16384, 192: 2048, 256: 2048, 512: 2048}
# Estimate of the Hopper forward by width, in us on an H200 (bench/NOTES.md): (fixed time of a block of rows, its time
# for every 64 keys). It decides the number of splits of the keys, for calls with few blocks. 192 and 512 are guesses.
BLOCK_US = {64: (1.5, 0.63), 128: (2.5, 0.8), 192: (4.0, 0.98), 256: (5.6, 1.44), 512: (9.0, 2.6)}
MERGE_US, MERGED_BYTES_A_US = 5.0, 3e6  # fixed time of merging splits, and the bytes that it reads and writes in a us
SHARED_PAIRS = 0.9  # causal programs take pairs of blocks if pairs keep at least this share of multiprocessors busy


# Tiles by `width_on_hopper`. The first is used. Others are candidates of `fusedattn tune`, or fit beside a bias.
# bench/results/h200.csv has their times.
HOPPER = {
    64: (Pipeline(2, 128, 3), Pipeline(3, 128, 2)),
    128: (Pipeline(2, 128, 2), Pipeline(2, 64, 4)),
    192: (Pipeline(2, 128, 2), Pipeline(2, 64, 3)),
    256: (Pipeline(2, 64, 2), Pipeline(2, 32, 4)),
    512: (Pipeline(2, 64, 1), Pipeline(2, 32, 1)),
}
# {width: {option: the most keys of a forward tile whose loop spills no registers}}
MOST_KEYS = {192: dict(alibi_slopes=64, seed=64)} | dict.fromkeys((256, 512), dict(alibi_slopes=32, seed=32))
IN_PARTS = 192
PARTS = {IN_PARTS: 64, 512: 128}  # by width, the columns of each part of a query or key tile in the forward
MOST_COLUMNS = 256  # most columns of values that a program of the forward multiplies

# {width: ({band: length}, the pipeline to try first if Sq and Sk are at least this length)}. At D 64 and these lengths
# or more, three warpgroups are 1.03 to 1.12 times as fast as two (an H200, bench/NOTES.md).
HOPPER_LONG = {64: (dict(full=2048, causal=8192), Pipeline(3, 128, 2))}

# The Hopper backwards, by width as in HOPPER. The first two add up dq in memory, "deterministic" in a fixed order. For
# wide heads they would spill registers, so hopper_bwd_ds stores gradients of scores, and hopper_bwd_wide also weights.
# PRODUCTS kernels multiply them. The second tile at 64 is for a float32 bias, which does not fit beside the first.
BACKWARDS: dict[str, dict[int, tuple]] = {
    **dict.fromkeys(
        ("hopper_bwd", "hopper_bwd_deterministic"), {64: (Backward(128, 2), Backward(64, 2)), 128: (Backward(64, 2),)}
    ),
    "hopper_bwd_ds": dict.fromkeys((IN_PARTS, 256), (Backward(64, 3),)),
    "hopper_bwd_wide": {512: (Backward(128, 3),)},
}
# By width, how many of softcap, ALiBi, bias, dropout and mask a backward takes at once; the default is one. With more,
# its loop would reload registers (bench/NOTES.md). At 128 it is one less if both a bias and a mask are given.
MOST_OPTIONS = {64: 4, 128: 3, 512: 5}
STORED = "hopper_bwd_ds", "hopper_bwd_wide"  # BACKWARDS that store gradients of scores, and the second also weights
REPEATABLE = "hopper_bwd_deterministic", *STORED  # deterministic BACKWARDS
# Kernels that multiply the tensors that STORED kernels stored. After hopper_bwd_wide, hopper_dk also computes dv.
PRODUCTS = "hopper_dk", "hopper_dq"
# Limit on the bytes of scores stored at a time, of kv heads or of a part of one (`hopper.parts_of`). Two heads, one
# head with its weights, or a query head of packed sequences may take twice as much.
SCORES_BYTES = 2**29
ON_HOPPER: dict[str, dict[int, tuple]] = {"hopper": HOPPER} | BACKWARDS
ONE_PASS = 128  # the widest heads of the kernel one_pass; wider heads leave no registers for a tile of dq
DECODE = {"decode_16": 16, "decode_32": 32, "decode_64": 64}  # {decode kernel: rows of its largest tile}
ON_CACHES = (*DECODE, "combine", "append")
MOST_SPLITS = 128  # the most programs that share the keys of a sequence

WIDTHS = 64, 128, 256, 512  # head dimensions in TABLE
WIDEST_CACHED = 576  # most columns of cached keys: in latent attention, 512 that are also values, and 64 of positions

# Small tiles, so that tiny shapes have blocks of every kind, but at least 16 rows and keys, as tensor cores need.
INTERPRETED = dict.fromkeys(("forward", "dq", "dbias", "tangent", "decode_32", "decode_64"), (Tile(32, 16, 4, 1),))
INTERPRETED |= dict.fromkeys(("weights", "tangent_weights", "dkdv", "one_pass"), (Tile(16, 32, 4, 1),))
INTERPRETED |= dict.fromkeys(("preprocess", "postprocess"), (Tile(32, None, 4, 1),))
INTERPRETED |= dict(decode_16=(Tile(16, 16, 4, 1),), combine=(Tile(2, None, 4, 1),), append=(Tile(4, None, 4, 1),))


def _one_each(kernel, architecture, itemsize, *tiles):
    """Return the rows of TABLE for a kernel with one tile for each of WIDTHS."""
    return {(kernel, architecture, itemsize, width): (tile,) for width, tile in zip(WIDTHS, tiles, strict=True)}


# (kernel, architecture, bytes of an element, `row_width` of D and Dv): tiles from the best to one that fits anywhere.
# On 9.0 three stages come first. As machine code shows, a loop with two stages waits for copies that began at the end
# of the previous step, so they overlap nothing. With three, it waits for copies that began one step earlier.
TABLE = {
    ("forward", 80, 2, 64): (Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)),
    ("forward", 80, 2, 128): (Tile(128, 64, 8, 2, spills=12), Tile(64, 32, 4, 2)),  # spills at D = 80
    ("forward", 80, 2, 256): (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    # Here and in dk/dv a few addresses spill outside of the loops. Half the rows would load each key twice as often.
    ("forward", 80, 2, 512): (Tile(64, 32, 8, 2, spills=28), Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    ("forward", 86, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    ("forward", 86, 2, 512): (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    ("forward", 90, 2, 64): (Tile(128, 128, 8, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("forward", 90, 2, 128): (Tile(128, 128, 8, 3, spills=40), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),  # D 80 spills
    ("forward", 90, 2, 256): (Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
    ("forward", 90, 2, 512): (Tile(64, 16, 8, 3, spills=4), Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    ("forward", 80, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("forward", 80, 4, 128): (Tile(32, 16, 8, 2),),
    ("forward", 80, 4, 256): (Tile(16, 16, 8, 1),),
    ("forward", 80, 4, 512): (Tile(16, 16, 8, 1),),
    ("dq", 80, 2, 64): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("dq", 80, 2, 128): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("dq", 80, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 16, 4, 2)),
    ("dq", 80, 2, 512): (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
    ("dq", 86, 2, 256): (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2)),
    ("dq", 86, 2, 512): (Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
    ("dq", 90, 2, 64): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    ("dq", 90, 2, 128): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    ("dq", 90, 2, 256): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 16, 4, 2)),
    ("dq", 80, 4, 64): (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    ("dq", 80, 4, 128): (Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
    ("dq", 80, 4, 256): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    ("dq", 80, 4, 512): (Tile(16, 16, 8, 1, spills=40),),
    ("dkdv", 80, 2, 64): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("dkdv", 80, 2, 128): (Tile(64, 64, 8, 2, spills=8), Tile(32, 64, 4, 2)),  # spills at D = 80, with triton 3.6.0
    ("dkdv", 80, 2, 256): (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),
    ("dkdv", 80, 2, 512): (Tile(32, 32, 8, 2, spills=20), Tile(32, 16, 8, 2)),
    ("dkdv", 86, 2, 256): (Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),
    ("dkdv", 86, 2, 512): (Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),  # the first has no room for a float32 bias
    ("dkdv", 90, 2, 64): (Tile(64, 128, 8, 3), Tile(64, 64, 4, 2)),
    # dk and dv take half of the registers. 32 x 128 does not spill, but takes 30% more instructions a row.
    ("dkdv", 90, 2, 128): (Tile(64, 128, 8, 3, spills=192), Tile(32, 64, 4, 2)),
    ("dkdv", 90, 2, 256): (Tile(32, 64, 8, 3, spills=184), Tile(16, 32, 4, 2)),
    ("dkdv", 80, 4, 64): (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)),
    ("dkdv", 80, 4, 128): (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    ("dkdv", 80, 4, 256): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    ("dkdv", 80, 4, 512): (Tile(16, 16, 8, 1, spills=308),),  # spills without tensor cores, but not with tf32
    # one_pass also adds dq to memory. A tile of dq takes registers. So do its addresses, unless TMA adds it.
    ("one_pass", 80, 2, 64): (Tile(64, 128, 8, 2, spills=40), Tile(64, 64, 4, 2, spills=40)),
    ("one_pass", 80, 2, 128): (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("one_pass", 90, 2, 64): (Tile(64, 128, 8, 3, bulk=True), Tile(64, 64, 4, 2, bulk=True)),
    ("one_pass", 90, 2, 128): (
        Tile(64, 128, 8, 3, spills=208, bulk=True),  # spills at D = 80
        # With 8 warps it hardly spills, but takes 35 instructions a pair instead of 19.
        Tile(64, 64, 4, 1, spills=576, bulk=True),
    ),
    ("one_pass", 80, 4, 64): (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)),
    ("one_pass", 80, 4, 128): (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    # Memory bound: enough rows to keep every thread busy.
    **_one_each("preprocess", 80, 2, *(Tile(n, None, 4, 1) for n in (64, 32, 16, 16))),
    # With 64 rows delta comes from a wgmma like dp, in the same order: dp - delta is 0 if one key has all weight.
    ("preprocess", 90, 2, 128): (Tile(64, None, 4, 1),),
    ("preprocess", 90, 2, 256): (Tile(64, None, 8, 1),),
    ("postprocess", 90, 2, 128): (Tile(64, None, 8, 1),),
    ("postprocess", 80, 2, 64): (Tile(64, None, 4, 1),),
    ("postprocess", 80, 2, 128): (Tile(32, None, 4, 1),),
    **_one_each("weights", 80, 2, *(Tile(n, 64, 4, 1) for n in (64, 64, 32, 32))),
    **_one_each("weights", 80, 4, Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
    **_one_each(
        "dbias", 80, 2, Tile(64, 64, 8, 2, spills=72), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)
    ),
    **_one_each("dbias", 90, 2, Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 32, 8, 1), Tile(16, 32, 8, 1)),
    **_one_each(
        "dbias", 80, 4, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), *(Tile(16, 16, 8, 1, spills=n) for n in (104, 52))
    ),
    # tangent computes five matrix products a tile, dq three.
    ("tangent", 80, 2, 64): (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    ("tangent", 80, 2, 128): (Tile(64, 32, 8, 2, spills=144), Tile(32, 32, 4, 2)),
    ("tangent", 80, 2, 256): (Tile(32, 32, 8, 2, spills=64), Tile(16, 16, 4, 2)),
    ("tangent", 80, 2, 512): (Tile(32, 32, 8, 1),),
    ("tangent", 90, 2, 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("tangent", 90, 2, 128): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("tangent", 90, 2, 256): (Tile(32, 32, 8, 2, spills=164), Tile(16, 16, 4, 2)),
    ("tangent", 80, 4, 64): (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    ("tangent", 80, 4, 128): (Tile(16, 16, 8, 1),),
    ("tangent", 80, 4, 256): (Tile(16, 16, 8, 1, spills=1140),),
    ("tangent", 80, 4, 512): (Tile(16, 16, 8, 1),),
    ("tangent_weights", 80, 2, 64): (Tile(64, 64, 4, 1),),
    ("tangent_weights", 80, 2, 128): (Tile(64, 64, 8, 1, spills=136), Tile(32, 32, 4, 1)),
    ("tangent_weights", 80, 2, 256): (Tile(32, 32, 8, 1, spills=84),),
    ("tangent_weights", 80, 2, 512): (Tile(16, 32, 8, 1),),
    ("tangent_weights", 80, 4, 64): (Tile(32, 32, 8, 1),),
    ("tangent_weights", 80, 4, 128): (Tile(16, 32, 8, 1, spills=84),),
    ("tangent_weights", 80, 4, 256): (Tile(16, 16, 8, 1, spills=132),),
    ("tangent_weights", 80, 4, 512): (Tile(16, 16, 8, 1),),
    # Memory bound: as many keys in flight as fit, in tiles of few rows.
    ("decode_16", 80, 2, 64): (Tile(16, 128, 4, 3), Tile(16, 64, 4, 3)),
    ("decode_16", 80, 2, 128): (Tile(16, 64, 4, 3), Tile(16, 32, 4, 3)),
    ("decode_16", 80, 2, 256): (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    ("decode_16", 80, 2, 512): (Tile(16, 64, 8, 2, spills=20), Tile(16, 32, 4, 2)),
    ("decode_16", 90, 2, 64): (Tile(16, 128, 4, 4), Tile(16, 64, 4, 3)),
    ("decode_16", 90, 2, 128): (Tile(16, 64, 4, 4), Tile(16, 32, 4, 3)),
    ("decode_16", 90, 2, 256): (Tile(16, 64, 4, 3), Tile(16, 32, 4, 2)),
    ("decode_16", 90, 2, 512): (Tile(16, 32, 4, 3), Tile(16, 32, 4, 2)),
    ("decode_16", 80, 4, 64): (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    ("decode_16", 80, 4, 128): (Tile(16, 32, 8, 2, spills=4), Tile(16, 16, 8, 2)),
    ("decode_16", 80, 4, 256): (Tile(16, 16, 8, 2),),
    ("decode_16", 80, 4, 512): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    ("decode_32", 80, 2, 64): (Tile(32, 128, 4, 3), Tile(32, 64, 4, 3)),
    ("decode_32", 80, 2, 128): (Tile(32, 64, 4, 3), Tile(32, 32, 4, 3)),
    ("decode_32", 80, 2, 256): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("decode_32", 80, 2, 512): (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    ("decode_32", 80, 4, 64): (Tile(32, 32, 4, 2),),
    ("decode_32", 80, 4, 128): (Tile(32, 16, 8, 2),),
    ("decode_32", 80, 4, 256): (Tile(16, 16, 8, 2),),
    ("decode_32", 80, 4, 512): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    ("decode_64", 80, 2, 64): (Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)),
    ("decode_64", 80, 2, 128): (Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)),
    ("decode_64", 80, 2, 256): (Tile(64, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("decode_64", 80, 2, 512): (Tile(64, 32, 8, 2, spills=88), Tile(32, 16, 8, 2)),
    ("decode_64", 80, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("decode_64", 80, 4, 128): (Tile(32, 16, 8, 2),),
    ("decode_64", 80, 4, 256): (Tile(16, 16, 8, 2),),
    ("decode_64", 80, 4, 512): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    **_one_each("combine", 80, 2, *(Tile(16, None, n, 1) for n in (1, 2, 4, 8))),
    **_one_each("append", 80, 2, *[Tile(16, None, 4, 1)] * 4),
}

# Tiles for calls that need more registers. MASKED: with a mask of pairs, which is also loaded in stages. RICH: with a
# bias, ALiBi, softcap or dropout.
MASKED = {
    ("forward", 90, 2, 128): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    ("dq", 90, 2, 256): (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 16, 4, 2)),
    ("dkdv", 90, 2, 256): (Tile(32, 64, 8, 2, spills=168), Tile(16, 32, 4, 2)),
    ("dkdv", 80, 2, 64): (Tile(32, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("one_pass", 80, 2, 64): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),
}
RICH = {
    ("forward", 80, 2, 64): (Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)),
    ("forward", 80, 2, 128): (Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 80, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    ("forward", 90, 2, 64): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    ("forward", 90, 2, 128): (Tile(128, 64, 8, 3), Tile(64, 32, 4, 2)),
    ("forward", 90, 2, 256): (Tile(128, 32, 8, 1, spills=60), Tile(32, 32, 4, 2)),
    ("dq", 80, 2, 64): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("dq", 80, 2, 256): (Tile(64, 32, 8, 2, spills=32), Tile(32, 32, 4, 2), Tile(32, 16, 4, 2)),
    ("dq", 90, 2, 256): (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 16, 4, 2)),
    ("dkdv", 80, 2, 64): (Tile(32, 128, 8, 2, spills=24), Tile(32, 32, 4, 2)),
    ("dkdv", 80, 2, 128): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2, spills=16)),
    ("dkdv", 80, 2, 256): (Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),
    # A bias of keys, with a sum for each key, spills most. 32 x 16 spills nothing, but its loop is 1.4 times as long.
    ("dkdv", 80, 2, 512): (Tile(32, 32, 8, 2, spills=504), Tile(32, 16, 8, 2)),
    ("dkdv", 90, 2, 64): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("dkdv", 90, 2, 128): (Tile(64, 64, 8, 2, spills=160), Tile(32, 64, 4, 2, spills=92)),
    ("dkdv", 90, 2, 256): (Tile(16, 64, 8, 2, spills=252), Tile(16, 32, 4, 2)),
    ("one_pass", 80, 2, 64): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("one_pass", 80, 2, 128): (Tile(64, 64, 8, 2, spills=32), Tile(32, 64, 8, 2)),
    # Tiles of half as many keys hardly spill, but take twice as many instructions a pair. With two stages and dropout,
    # ptxas makes each product wait for the previous product.
    ("one_pass", 90, 2, 128): (Tile(64, 128, 8, 3, spills=440, bulk=True), Tile(64, 64, 4, 1, spills=432, bulk=True)),
}

# {`run.kind_of` a call: tiles to try, without tiles that did not fit the device}
fitting: dict[tuple, tuple[Tile, ...]] = {}


def architecture(capability):
    """Return the architecture whose rows a GPU tries first. 86 stands for GPUs with little shared memory."""
    return 90 if 90 <= capability < 120 else 80 if capability in (80, 87) else 86


def row_width(width: int) -> int:
    """Round a head dimension up to a width of the tile table: 64, 128, 256 or 512."""
    return next((each for each in WIDTHS if width <= each), WIDTHS[-1])


def width_on_hopper(D: int, DV: int) -> int:
    """Return the width of a call in HOPPER: `row_width`, or 192 for the sizes of latent attention."""
    return IN_PARTS if 128 < D <= IN_PARTS and DV <= 128 else row_width(max(D, DV))


def small_enough(tiles):
    return tuple(tile for tile in tiles if max(tile.rows, tile.keys or 0) <= 64)


def tiles_for(kernel, capability, itemsize, width, pressure="plain"):
    """Return the tiles to try, best first, for one kernel on one GPU.

    Args:
        capability: 90 for (9, 0); None in Triton's interpreter. A GPU without rows uses the rows of 80.
        itemsize: bytes of an element of query. width: the wider of D and Dv.
        pressure: register pressure: "plain", "masked" (a mask of pairs) or "rich" (bias, slopes, cap or dropout).
    """
    if capability is None:
        return INTERPRETED[kernel]
    width = row_width(width)
    for place in ((architecture(capability), itemsize), (80, itemsize), (80, 2)):
        for table in {"plain": (TABLE,), "masked": (MASKED, TABLE), "rich": (RICH, TABLE)}[pressure]:
            key = (kernel, *place, width)
            if key in table:
                return table[key]
    raise KeyError(f"no tiles for {kernel}, sm_{capability}, {itemsize} bytes, width {width}")
