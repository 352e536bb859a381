"""The table of tile sizes by kernel and GPU, and the functions that look them up.

Rows were chosen offline, by registers and spills in compiled code (`make compile`). One that has been timed says so,
with its GPU and number (`fusedattn tune`).
"""

import functools
import math
from typing import NamedTuple


class Tile(NamedTuple):
    """What one program works on, and the bytes it may spill: more is an error of `make compile`. keys may be None.

    What the copy engine does, which there is from 9.0 on, or else the threads do, bulk: add tiles of dq in memory;
    tma: load what a loop walks, keys and values, or queries and the gradient of the output, where `arguments.described`
    has them so.
    """

    rows: int
    keys: int | None
    warps: int
    stages: int
    spills: int = 0
    bulk: bool = False
    tma: bool = False


class Pipeline(NamedTuple):
    """How the kernel for Hopper works on a block of rows: no row of its table may spill.

    warpgroups: those that multiply, WARPGROUP_ROWS rows each. stages: how many blocks of keys, and of values, are there
    at once. persistent: whether as many programs as there are multiprocessors share the blocks of rows where no band
    makes these unequal, or each has one; a fixed deal of unequal ones was 19 % slower (an H200, D 128, causal, S 4096).
    ping_pong: whether two warpgroups take turns to multiply.
    """

    warpgroups: int
    keys: int
    stages: int
    persistent: bool = True
    ping_pong: bool = False

    @property
    def rows(self):
        return self.warpgroups * WARPGROUP_ROWS


class Backward(NamedTuple):
    """How the backward for Hopper works on a block of keys, WARPGROUP_ROWS for each of two warpgroups.

    rows: of the blocks that it walks. stages: how many of these are there at once, or, where gradients of scores are
    stored, of the blocks that the kernels after it walk.
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
    """Return a Tile without its allowed spills; anything else unchanged."""
    return form._replace(spills=0) if isinstance(form, Tile) else form


WARPGROUP_ROWS = 64
MULTIPROCESSORS = 132  # of an H100 or H200, which `explain` assumes for compute capability 9.0
# By how many warpgroups multiply: registers of a thread when it starts, then of those that multiply, and of the one
# that copies. What is asked for then, over all, must not pass what there was: it would wait for ever.
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 24)}
FEW_ROWS = 64  # no more than these take no larger tile; as many of several heads may share one
L2_BYTES = 32 << 20  # keys and values that stay there while the blocks of their planes are worked on

# The same of queries and incoming gradients, beside gradients of scores, which come and go; of products half of it. On
# an H200 the backward takes 1.25 times as long without at 1024 tokens, 1.17 times at 2048.
SECTION_BYTES = 16 << 20

# By width: programs take several blocks of rows each if a row sees at most so many keys, in full calls and with a band.
# With more keys, one block a program was as fast or faster on an H200, by 0.98 to 1.04 (bench/NOTES.md).
SHARED_KEYS = {128: 16384}
SHARED_KEYS_OF_BANDS = {64: 4096, 128: 16384, 256: 2048}
# Programs take pairs of blocks if at least this share of them has a pair in the last round.
SHARED_PAIRS = 0.9

# By width: the first is taken, the others are candidates of `fusedattn tune`. bench/results/h200.csv has their times.
HOPPER = {
    64: (
        Pipeline(2, 128, 3),
        Pipeline(2, 128, 3, ping_pong=True),
        Pipeline(2, 128, 3, persistent=False),
        Pipeline(3, 128, 2),
    ),
    128: (
        Pipeline(2, 128, 2),
        Pipeline(2, 128, 2, ping_pong=True),
        Pipeline(2, 128, 2, persistent=False),
        Pipeline(2, 64, 4),
    ),
    256: (Pipeline(2, 64, 2), Pipeline(2, 64, 2, ping_pong=True), Pipeline(2, 64, 2, persistent=False)),
}

# By width: the pipeline that comes first in full calls, and in causal ones, of at least so many rows and keys. At D 64
# three warpgroups are 1.03 to 1.12 times as fast as two there (an H200, bench/NOTES.md).
HOPPER_LONG = {64: (dict(full=2048, causal=8192), Pipeline(3, 128, 2))}

# The backwards for Hopper, by width as HOPPER: those that add to dq, one of them in turns. With wide heads that would
# spill; there one stores gradients of scores.
BACKWARDS: dict[str, dict[int, tuple]] = {
    **dict.fromkeys(("hopper_bwd", "hopper_bwd_deterministic"), {64: (Backward(128, 2),), 128: (Backward(64, 2),)}),
    "hopper_bwd_ds": {256: (Backward(64, 3),)},
}
REPEATABLE = "hopper_bwd_deterministic", "hopper_bwd_ds"  # of BACKWARDS: with the same bits each time
PRODUCTS = "hopper_dk", "hopper_dq"  # kernels that go on from what "hopper_bwd_ds" has stored
SCORES_BYTES = 2**29  # of gradients of scores that are stored at a time; of two heads it may be twice that
ON_HOPPER: dict[str, dict[int, tuple]] = {"hopper": HOPPER} | BACKWARDS

# Kernels of which `fusedattn tune` measures each form, in that order. two_passes is dq and dkdv, each by its best form.
MEASURED = ("forward", "hopper", "dq", "dkdv", "one_pass", *BACKWARDS, "two_passes")

# The widest heads whose universal backward may be one pass: with wider ones there is no room for a tile of dq.
ONE_PASS = 128

# By how many rows there are to share a tile, the kernel that reads caches: each has tiles of its own.
DECODE = {"decode_16": 16, "decode_32": 32, "decode_64": 64}
ON_CACHES = (*DECODE, "combine", "append")
MOST_SPLITS = 128  # programs that share the keys of a sequence

# Small, so that tiny shapes have blocks of every kind; never 8 rows or keys: no tensor core is that small.
INTERPRETED = dict.fromkeys(("forward", "dq", "dbias", "tangent", "decode_32", "decode_64"), (Tile(32, 16, 4, 1),))
INTERPRETED |= dict.fromkeys(("weights", "tangent_weights", "dkdv", "one_pass"), (Tile(16, 32, 4, 1),))
INTERPRETED |= dict.fromkeys(("preprocess", "postprocess"), (Tile(32, None, 4, 1),))
INTERPRETED |= dict(decode_16=(Tile(16, 16, 4, 1),), combine=(Tile(2, None, 4, 1),), append=(Tile(4, None, 4, 1),))

# (pass, architecture, bytes of an element, width): from the best to what fits anywhere. The width is that of the wider
# of D and Dv, a power of two; a narrower one takes the row of 64.
# On 9.0 three stages come first: with two a loop waits at its head for the copies that its last step began at its end,
# which then overlap nothing; with three for those of the step before. So it stands in machine code.
TABLE = {
    ("forward", 80, 2, 64): (Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)),
    ("forward", 80, 2, 128): (Tile(128, 64, 8, 2, spills=12), Tile(64, 32, 4, 2)),  # at D = 80
    ("forward", 80, 2, 256): (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    ("forward", 86, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    ("forward", 90, 2, 64): (Tile(128, 128, 8, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("forward", 90, 2, 128): (
        Tile(128, 128, 8, 3, spills=40),  # at D = 80
        Tile(128, 64, 8, 3),
        Tile(64, 64, 4, 2),
    ),
    ("forward", 90, 2, 256): (Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
    ("forward", 80, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("forward", 80, 4, 128): (Tile(32, 16, 8, 2),),
    ("forward", 80, 4, 256): (Tile(16, 16, 8, 1),),
    ("dq", 80, 2, 64): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("dq", 80, 2, 128): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("dq", 80, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 16, 4, 2)),
    ("dq", 86, 2, 256): (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2)),
    ("dq", 90, 2, 64): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
    ("dq", 90, 2, 128): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    ("dq", 90, 2, 256): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 16, 4, 2)),
    ("dq", 80, 4, 64): (Tile(32, 32, 8, 2), Tile(32, 16, 8, 2)),
    ("dq", 80, 4, 128): (Tile(32, 16, 8, 2), Tile(16, 16, 8, 2)),
    ("dq", 80, 4, 256): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    ("dkdv", 80, 2, 64): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("dkdv", 80, 2, 128): (Tile(64, 64, 8, 2, spills=8), Tile(32, 64, 4, 2)),  # at D = 80, by triton 3.6.0
    ("dkdv", 80, 2, 256): (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),
    ("dkdv", 86, 2, 256): (Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),
    ("dkdv", 90, 2, 64): (Tile(64, 128, 8, 3), Tile(64, 64, 4, 2)),
    # dk and dv alone are half of the registers. 32 x 128 does not spill, and takes 30% more instructions a row.
    ("dkdv", 90, 2, 128): (Tile(64, 128, 8, 3, spills=192), Tile(32, 64, 4, 2)),
    ("dkdv", 90, 2, 256): (Tile(32, 64, 8, 3, spills=184), Tile(16, 32, 4, 2)),
    ("dkdv", 80, 4, 64): (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)),
    ("dkdv", 80, 4, 128): (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    ("dkdv", 80, 4, 256): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    # dkdv and dq in one. A tile of dq takes registers, and where threads add it so do its addresses.
    ("one_pass", 80, 2, 64): (Tile(64, 128, 8, 2, spills=40), Tile(64, 64, 4, 2, spills=40)),
    ("one_pass", 80, 2, 128): (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    ("one_pass", 90, 2, 64): (Tile(64, 128, 8, 3, bulk=True), Tile(64, 64, 4, 2, bulk=True)),
    ("one_pass", 90, 2, 128): (
        Tile(64, 128, 8, 3, spills=208, bulk=True),  # at D = 80
        # With 8 warps it hardly spills, and takes 35 instructions a pair for 19.
        Tile(64, 64, 4, 1, spills=576, bulk=True),
    ),
    ("one_pass", 80, 4, 64): (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)),
    ("one_pass", 80, 4, 128): (Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    # Memory bound: as many rows as keep every thread busy.
    ("preprocess", 80, 2, 64): (Tile(64, None, 4, 1),),
    ("preprocess", 80, 2, 128): (Tile(32, None, 4, 1),),
    ("preprocess", 80, 2, 256): (Tile(16, None, 4, 1),),
    # The rows that wgmma multiplies at once: delta is then summed as dp is.
    ("preprocess", 90, 2, 128): (Tile(64, None, 4, 1),),
    ("preprocess", 90, 2, 256): (Tile(64, None, 8, 1),),
    ("postprocess", 90, 2, 128): (Tile(64, None, 8, 1),),
    ("postprocess", 80, 2, 64): (Tile(64, None, 4, 1),),
    ("postprocess", 80, 2, 128): (Tile(32, None, 4, 1),),
    ("weights", 80, 2, 64): (Tile(64, 64, 4, 1),),
    ("weights", 80, 2, 128): (Tile(64, 64, 4, 1),),
    ("weights", 80, 2, 256): (Tile(32, 64, 4, 1),),
    ("weights", 80, 4, 64): (Tile(32, 32, 4, 1),),
    ("weights", 80, 4, 128): (Tile(32, 32, 8, 1),),
    ("weights", 80, 4, 256): (Tile(16, 32, 8, 1),),
    ("dbias", 80, 2, 64): (Tile(64, 64, 8, 2, spills=72),),
    ("dbias", 80, 2, 128): (Tile(32, 32, 8, 2),),
    ("dbias", 80, 2, 256): (Tile(32, 32, 8, 2),),
    ("dbias", 90, 2, 64): (Tile(64, 64, 4, 2),),
    ("dbias", 90, 2, 128): (Tile(64, 64, 8, 1),),
    ("dbias", 90, 2, 256): (Tile(64, 32, 8, 1),),
    ("dbias", 80, 4, 64): (Tile(32, 32, 8, 1),),
    ("dbias", 80, 4, 128): (Tile(16, 32, 8, 1),),
    ("dbias", 80, 4, 256): (Tile(16, 16, 8, 1, spills=104),),
    # Five products, where dq has three: of q and k with each other and with each other's tangents, and with values.
    ("tangent", 80, 2, 64): (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    ("tangent", 80, 2, 128): (Tile(64, 32, 8, 2, spills=144), Tile(32, 32, 4, 2)),
    ("tangent", 80, 2, 256): (Tile(32, 32, 8, 2, spills=64), Tile(16, 16, 4, 2)),
    ("tangent", 90, 2, 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("tangent", 90, 2, 128): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("tangent", 90, 2, 256): (Tile(32, 32, 8, 2, spills=164), Tile(16, 16, 4, 2)),
    ("tangent", 80, 4, 64): (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    ("tangent", 80, 4, 128): (Tile(16, 16, 8, 1),),
    ("tangent", 80, 4, 256): (Tile(16, 16, 8, 1, spills=1140),),
    ("tangent_weights", 80, 2, 64): (Tile(64, 64, 4, 1),),
    ("tangent_weights", 80, 2, 128): (Tile(64, 64, 8, 1, spills=136), Tile(32, 32, 4, 1)),
    ("tangent_weights", 80, 2, 256): (Tile(32, 32, 8, 1, spills=84),),
    ("tangent_weights", 80, 4, 64): (Tile(32, 32, 8, 1),),
    ("tangent_weights", 80, 4, 128): (Tile(16, 32, 8, 1, spills=84),),
    ("tangent_weights", 80, 4, 256): (Tile(16, 16, 8, 1, spills=132),),
    # Memory bound: as many keys in flight as fit, in tiles of as few rows as there are.
    ("decode_16", 80, 2, 64): (Tile(16, 128, 4, 3), Tile(16, 64, 4, 3)),
    ("decode_16", 80, 2, 128): (Tile(16, 64, 4, 3), Tile(16, 32, 4, 3)),
    ("decode_16", 80, 2, 256): (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    ("decode_16", 90, 2, 64): (Tile(16, 128, 4, 4), Tile(16, 64, 4, 3)),
    ("decode_16", 90, 2, 128): (Tile(16, 64, 4, 4), Tile(16, 32, 4, 3)),
    ("decode_16", 90, 2, 256): (Tile(16, 64, 4, 3), Tile(16, 32, 4, 2)),
    ("decode_16", 80, 4, 64): (Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)),
    ("decode_16", 80, 4, 128): (Tile(16, 32, 8, 2, spills=4), Tile(16, 16, 8, 2)),
    ("decode_16", 80, 4, 256): (Tile(16, 16, 8, 2),),
    ("decode_32", 80, 2, 64): (Tile(32, 128, 4, 3), Tile(32, 64, 4, 3)),
    ("decode_32", 80, 2, 128): (Tile(32, 64, 4, 3), Tile(32, 32, 4, 3)),
    ("decode_32", 80, 2, 256): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("decode_32", 80, 4, 64): (Tile(32, 32, 4, 2),),
    ("decode_32", 80, 4, 128): (Tile(32, 16, 8, 2),),
    ("decode_32", 80, 4, 256): (Tile(16, 16, 8, 2),),
    ("decode_64", 80, 2, 64): (Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)),
    ("decode_64", 80, 2, 128): (Tile(64, 64, 4, 3), Tile(64, 32, 4, 2)),
    ("decode_64", 80, 2, 256): (Tile(64, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("decode_64", 80, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    ("decode_64", 80, 4, 128): (Tile(32, 16, 8, 2),),
    ("decode_64", 80, 4, 256): (Tile(16, 16, 8, 2),),
    ("combine", 80, 2, 64): (Tile(16, None, 1, 1),),
    ("combine", 80, 2, 128): (Tile(16, None, 2, 1),),
    ("combine", 80, 2, 256): (Tile(16, None, 4, 1),),
    ("append", 80, 2, 64): (Tile(16, None, 4, 1),),
    ("append", 80, 2, 128): (Tile(16, None, 4, 1),),
    ("append", 80, 2, 256): (Tile(16, None, 4, 1),),
}

# What calls take that would spill in the rows above, or take more shared memory than there is: those with a mask of
# pairs, which is copied by stages too, and those with more than that.
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
    ("dq", 86, 2, 256): (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2)),
    ("dq", 90, 2, 256): (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 16, 4, 2)),
    ("dkdv", 80, 2, 64): (Tile(32, 128, 8, 2, spills=24), Tile(32, 32, 4, 2)),
    ("dkdv", 80, 2, 128): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2, spills=16)),
    ("dkdv", 80, 2, 256): (Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),
    ("dkdv", 90, 2, 64): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("dkdv", 90, 2, 128): (Tile(64, 64, 8, 2, spills=160), Tile(32, 64, 4, 2, spills=92)),
    ("dkdv", 90, 2, 256): (Tile(16, 64, 8, 2, spills=252), Tile(16, 32, 4, 2)),
    ("one_pass", 80, 2, 64): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("one_pass", 80, 2, 128): (Tile(64, 64, 8, 2, spills=32), Tile(32, 64, 8, 2)),
    # Half as many keys hardly spill, and take twice as many instructions a pair. With two stages ptxas has each product
    # of a call with dropout wait for the one before.
    ("one_pass", 90, 2, 128): (Tile(64, 128, 8, 3, spills=440, bulk=True), Tile(64, 64, 4, 1, spills=432, bulk=True)),
}

# What plain calls take only where `fusedattn tune` found it faster: fewer stages in less shared memory; two
# programs of four warps that share a multiprocessor, so that one multiplies under the other's softmax; and loads by the
# copy engine, which take fewer instructions and registers in the forward and in dq, and more spills in dk/dv at D 128.
CANDIDATES = {
    ("forward", 90, 2, 64): (
        Tile(128, 128, 8, 3, tma=True),
        Tile(64, 128, 4, 3, tma=True),
        Tile(128, 64, 4, 3, tma=True),
        Tile(64, 128, 4, 3),
        Tile(128, 64, 4, 3),
        Tile(128, 64, 8, 3),
    ),
    ("forward", 90, 2, 128): (
        Tile(128, 128, 8, 3, tma=True),
        Tile(128, 64, 8, 4, tma=True),
        Tile(64, 64, 4, 3, tma=True),
        Tile(128, 128, 8, 2),
    ),
    ("forward", 90, 2, 256): (
        Tile(128, 32, 8, 4, tma=True),
        Tile(128, 64, 8, 2, tma=True),
        Tile(128, 32, 8, 4),
        Tile(128, 64, 8, 2),
    ),
    ("dq", 90, 2, 64): (Tile(128, 128, 8, 2, tma=True), Tile(128, 64, 8, 3, tma=True), Tile(128, 128, 8, 2)),
    ("dq", 90, 2, 128): (Tile(128, 64, 8, 3, tma=True),),
    ("dq", 90, 2, 256): (Tile(128, 32, 8, 3, spills=72, tma=True),),
    ("dkdv", 90, 2, 64): (Tile(64, 128, 8, 3, tma=True), Tile(64, 128, 8, 2)),
    ("dkdv", 90, 2, 128): (Tile(64, 128, 8, 2, spills=192), Tile(64, 64, 8, 3, tma=True)),
    ("dkdv", 90, 2, 256): (Tile(32, 64, 8, 2, spills=168),),
    ("one_pass", 90, 2, 64): (
        Tile(64, 128, 8, 3, bulk=True, tma=True),
        Tile(64, 64, 4, 3, bulk=True, tma=True),
        Tile(64, 128, 8, 2, bulk=True),
    ),
    ("one_pass", 90, 2, 128): (
        Tile(64, 64, 8, 3, spills=40, bulk=True, tma=True),
        Tile(64, 128, 8, 2, spills=184, bulk=True),
    ),
}

# What kernels were given so far, less what the device was found not to hold: {kind, as `run.kind_of` has it: tiles}.
fitting: dict[tuple, tuple[Tile, ...]] = {}


def architecture(capability):
    """Return the architecture whose rows a GPU takes first: 86, 89 and 120 have little shared memory."""
    return 90 if 90 <= capability < 120 else 80 if capability in (80, 87) else 86


def block_mask_size(interpreted: bool) -> int:
    """Return the size of a block of the block mask, the same on every GPU."""
    return 16 if interpreted else 64


def row_width(width: int) -> int:
    """Return the table width for a head dimension."""
    return 64 if width <= 64 else 128 if width <= 128 else 256


def small_enough(tiles):
    return tuple(tile for tile in tiles if max(tile.rows, tile.keys or 0) <= 64)


def narrow(left, right):
    """Return whether a band with these sides (None: unbounded) takes tiles of at most 64 rows and 64 keys.

    A tile of n rows meets n - 1 keys more than one row does: with 128 rows that is over a tenth of such a band.
    """
    return left is not None and right is not None and left + 1 + right < 10 * 127


def tiles_for(kernel, capability, itemsize, width, load="plain", narrow=False):
    """Tiles to try, best first, for one kernel on one GPU; capability None is Triton's interpreter.

    Args:
        kernel: "forward", "weights", "preprocess", "dq", "dkdv", "one_pass", "postprocess", "dbias", "tangent",
            "tangent_weights", "append", "combine" or one of DECODE.
        capability: compute capability, 90 for (9, 0). One without rows of its own takes those of the last that has.
        itemsize: bytes of an element of query.
        width: the wider of D and Dv.
        load: what else needs registers: "plain" nothing, "masked" a mask of pairs, "rich" a bias, slopes, a cap or
            dropout.
        narrow: whether the band of the call is, as the function of that name has it, or its rows are few.
    """
    if capability is None:
        return INTERPRETED[kernel]
    if narrow:
        return small_enough(tiles_for(kernel, capability, itemsize, width, load))
    width = row_width(width)
    for place in ((architecture(capability), itemsize), (80, itemsize), (80, 2)):
        for table in {"plain": (TABLE,), "masked": (MASKED, TABLE), "rich": (RICH, TABLE)}[load]:
            key = (kernel, *place, width)
            if key in table:
                return table[key]
    raise KeyError(f"no tiles for {kernel}, sm_{capability}, {itemsize} bytes, width {width}")


def candidates(kernel, capability, itemsize, width, load="plain"):
    """Return the forms that `fusedattn tune` measures."""
    if kernel == "two_passes":
        return (None,)
    if kernel in ON_HOPPER:
        return ON_HOPPER[kernel].get(width, ()) if (capability, itemsize, load) == (90, 2, "plain") else ()
    if kernel == "one_pass" and width > ONE_PASS:
        return ()
    known = tiles_for(kernel, capability, itemsize, width, load)
    if capability is not None and load == "plain":
        known += CANDIDATES.get((kernel, architecture(capability), itemsize, row_width(width)), ())
    return tuple(map(same, known))


def forms_on_hopper(kernel, width, length, band, ranked=()):
    """Return the forms of a kernel for Hopper, best first.

    Args:
        width: the wider of D and Dv, as `row_width` has it. length: the fewer of rows and keys.
        band: what a call is, "full", "causal" (one side is bounded) or "window".
        ranked: those of a tuning file, the fastest first. `fusedattn tune` times long calls, so the form of long calls
            comes last in others.
    """
    forms = ON_HOPPER[kernel].get(width, ())
    least, long = HOPPER_LONG.get(width, ({}, None))
    is_long = length >= least.get(band, math.inf)
    first = [form for form in forms if form == long and is_long]
    return sorted(dict.fromkeys((*ranked, *first, *forms)), key=lambda form: form == long and not is_long)


def decoder(rows):
    """Return the decode kernel for a number of rows that read one key head."""
    return next((name for name, most in DECODE.items() if rows <= most), "decode_64")


@functools.lru_cache(maxsize=1024)  # caches grow: of each length it is asked once more
def splits(programs, blocks, multiprocessors):
    """How many shares the keys of each sequence are divided into, so that the GPU is full and the merge is worth it.

    Args:
        programs: that there are without. blocks: of keys, of the longest sequence that there may be.
        multiprocessors: of the GPU; None is Triton's interpreter, which takes as many as make a difference.
    Source: the rule of FlashAttention-2, which counts each multiprocessor twice.
    """
    if multiprocessors is None:
        return max(1, min(2, blocks))
    places = 2 * multiprocessors
    if programs >= 0.8 * places or blocks <= 4:
        return 1
    # More shares of the same number of blocks finish no earlier.
    most = min(MOST_SPLITS, places, blocks)
    useful = [n for n in range(1, most + 1) if n == 1 or -(-blocks // n) < -(-blocks // (n - 1))]

    def efficiency(n):
        return programs * n / (places * -(-programs * n // places))

    enough = 0.85 * max(map(efficiency, useful))
    return next(n for n in useful if efficiency(n) >= enough)
