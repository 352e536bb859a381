"""Layout of Philox counters (`dropout.four`) beside scores in Gluon kernels."""

import triton
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def layout(COLUMNS):
    """Return a layout that gives each thread the counters of its own scores. A counter serves 2 x 2 scores.

    The scores [64, COLUMNS] are a wgmma result of one warpgroup.
    """
    registers = [[0, 1], *([0, 8 << i] for i in range(COLUMNS.bit_length() - 5))]
    lanes, warps = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [32, COLUMNS // 2])
