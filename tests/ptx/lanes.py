"""Lanes: the threads of some blocks (CTAs), which are executed together. An array has one element a lane.

A mask m says which lanes are active, that is, execute an instruction; it is None where all are. There are no clusters:
a block is a cluster by itself.
"""

import numpy as np

from .ops import F32, U8, U16, U32
from .report import Fault

ALL = slice(None)  # the index of all lanes
PARAMS_AT = 1 << 30  # where kernel parameters seem to lie, for instructions that take their addresses: 32 bits or 64


def disagree(stored, given):
    """Return the lanes whose number differs from the stored one, if several lanes store to one place.

    Two NaNs are the same: the hardware has one, NumPy many. A store does not tell the type of its numbers, so the rule
    holds for integers of 16 and 32 bits as well.
    """
    found = stored != given
    if found.any() and stored.dtype.itemsize == 4:
        found &= ~(np.isnan(stored.view(F32)) & np.isnan(given.view(F32)))
    elif found.any() and stored.dtype.itemsize == 2:
        infinity = U16(0x7C00)  # of float16; that of bfloat16 is above
        found &= ~((stored & U16(0x7FFF) > infinity) & (given & U16(0x7FFF) > infinity))
    return found


class Lanes:
    """The lanes, their registers, and what they were launched with.

    Args:
        program: the Program to execute. memory: the Memory. params: {name: bytes, or a descriptor}.
        ctas: (C, 3) places of the blocks in the grid. grid: its size along x, y and z.
        smem: bytes of shared memory of a block. report: the Report. races: whether to watch shared memory.
        tensor_core: the TensorCore that sums up products; by default sums are rounded.
    """

    def __init__(self, program, memory, params, ctas, grid, smem, report, races=True, tensor_core=None):
        self.program, self.memory, self.params, self.report, self.races = program, memory, params, report, races
        self.tensor_core = tensor_core
        self.T, self.C = program.kernel.threads, len(ctas)  # threads of a block, blocks
        self.L, self.W = self.T * self.C, self.T // 32  # lanes, warps of a block
        self.smem_size, self.stride = smem, -(-max(smem, 1) // 1024) * 1024  # bytes of a block, and up to the next
        lane = np.arange(self.L)
        self.cta, self.gwarp = lane // self.T, lane // 32  # a lane's block, and its warp among all
        x, y, z = ctas[self.cta].T
        self.number = x + grid[0] * (y + grid[1] * z)  # of a lane's block in the grid
        self.R = [self._poison(home) for home in program.home]  # the registers
        self.consts = {}
        zero, one = np.zeros(self.L, U32), np.ones(self.L, U32)
        self.specials = {"%laneid": lane.astype(U32) % 32, "%cluster_ctarank": zero}
        for axis, name in enumerate("xyz"):
            self.specials |= {
                f"%tid.{name}": zero if axis else (lane % self.T).astype(U32),
                f"%ntid.{name}": one if axis else one * U32(self.T),
                f"%ctaid.{name}": ctas[self.cta, axis].astype(U32),
                f"%nctaid.{name}": one * U32(grid[axis]),
                f"%cluster_ctaid.{name}": zero,
                f"%cluster_nctaid.{name}": one,
            }

    def _poison(self, home):
        """A register before its first write: NaN, or all bits."""
        if home is np.bool_:
            return np.ones(self.L, bool)
        return np.full(self.L * np.dtype(home).itemsize, 0xFF, U8).view(home)

    # Which lanes

    def lanes(self, m):
        """The index of the active lanes."""
        return ALL if m is None else np.flatnonzero(m)

    def each(self, m, *values):
        """(lane, its element of each value) of the active lanes, one by one."""
        values = [self.full(x) for x in values]
        for lane in np.arange(self.L)[self.lanes(m)]:
            yield lane, *(int(x[lane]) for x in values)

    def converged(self, m, line, size=32):
        """The numbers of the active warps, or of groups of another size; none may be active in part."""
        if m is None:
            return np.arange(self.L // size)
        groups = m.reshape(-1, size)
        if (groups.any(1) != groups.all(1)).any():
            raise Fault(f"line {line}: some of {size} lanes that act together are not there")
        return np.flatnonzero(groups[:, 0])

    # Values

    def full(self, x):
        """An array of all lanes, from one or from a number."""
        if isinstance(x, np.ndarray) and x.ndim:
            return x
        key = x.dtype.str, x.tobytes()
        if key not in self.consts:
            self.consts[key] = np.full(self.L, x)
        return self.consts[key]

    def alike(self, m, x, line):
        """The one number that all active lanes have."""
        found = self.full(x)[self.lanes(m)]
        if (found != found[0]).any():
            raise NotImplementedError(f"line {line}: lanes differ")
        return int(found[0])

    def spread(self, m, found):
        """Rows over the active lanes as rows over all lanes, 0 in the others."""
        if m is None:
            return found
        result = np.zeros((len(found), self.L), found.dtype)
        result[:, self.lanes(m)] = found
        return result

    def special(self, name):
        """A special register such as %tid.x."""
        if name not in self.specials:
            raise NotImplementedError(name)
        return self.specials[name]

    # Parameters of the kernel

    def param_address(self, name, dtype):
        """The address of a parameter, which only `param_at` understands."""
        return self.full(dtype(PARAMS_AT + 4096 * list(self.program.params).index(name)))

    def param_at(self, address):
        """The parameter at an address."""
        return self.params[list(self.program.params)[(address - PARAMS_AT) // 4096]]

    def load_param(self, name, offset, small, wide):
        """The number of type `small` that lies in a parameter, as `wide`."""
        raw = self.params[name][offset : offset + small().itemsize]
        return self.full(np.frombuffer(raw, small)[0].astype(wide))
