"""Lanes: the threads of several blocks (CTAs), executed together. Arrays have one element per lane.

A mask m marks the active lanes, which execute an instruction; None stands for all. Each block is its own cluster.
"""

import numpy as np

from .ops import F32, U8, U16, U32
from .report import Fault

ALL = slice(None)  # the index of all lanes
PARAMS_AT = 1 << 30  # address of the kernel parameters, in 32 or 64 bits


def disagree(stored, given):
    """Return a mask of the lanes whose number is not the one stored, if several lanes store to one address.

    Two NaNs are equal: hardware has one NaN, NumPy has many. A store has no type, so this also holds for integers of
    16 and 32 bits.
    """
    found = stored != given
    if found.any() and stored.dtype.itemsize == 4:
        found &= ~(np.isnan(stored.view(F32)) & np.isnan(given.view(F32)))
    elif found.any() and stored.dtype.itemsize == 2:
        infinity = U16(0x7C00)  # bits of infinity in float16, which are below those in bfloat16
        found &= ~((stored & U16(0x7FFF) > infinity) & (given & U16(0x7FFF) > infinity))
    return found


class Lanes:
    """The lanes (threads) of a launch, their registers, and the kernel's arguments.

    Args:
        program: the Program to execute. memory: the Memory. params: {name: bytes, or a descriptor}.
        ctas: (C, 3) places of the blocks in the grid. grid: its size along x, y and z.
        smem: bytes of shared memory of a block. report: the Report.
        tensor_core: the TensorCore that adds products; by default sums are rounded.
    """

    def __init__(self, program, memory, params, ctas, grid, smem, report, tensor_core=None):
        self.program, self.memory, self.params, self.report = program, memory, params, report
        self.tensor_core = tensor_core
        self.T, self.C = program.kernel.threads, len(ctas)  # threads of a block, blocks
        self.L, self.W = self.T * self.C, self.T // 32  # lanes, warps of a block
        self.smem_size, self.stride = smem, -(-max(smem, 1) // 1024) * 1024  # bytes of a block, and distance of blocks
        lane = np.arange(self.L)
        self.cta, self.gwarp = lane // self.T, lane // 32  # a lane's block, and its warp among all
        x, y, z = ctas[self.cta].T
        self.number = x + grid[0] * (y + grid[1] * z)  # number of a lane's block in the grid
        self.R = [self._poison(home) for home in program.home]  # the registers
        self.consts = {}
        self.specials = {"%tid.x": (lane % self.T).astype(U32)}
        for axis, name in enumerate("xyz"):
            self.specials[f"%ctaid.{name}"] = ctas[self.cta, axis].astype(U32)
            self.specials[f"%nctaid.{name}"] = np.full(self.L, grid[axis], U32)

    def _poison(self, home):
        """Return a register before its first write: all bits are set, which is NaN in a float."""
        if home is np.bool_:
            return np.ones(self.L, bool)
        return np.full(self.L * np.dtype(home).itemsize, 0xFF, U8).view(home)

    # Active lanes

    def lanes(self, m):
        return ALL if m is None else np.flatnonzero(m)

    def each(self, m, *values):
        """Yield (lane, its element of each value) for each active lane."""
        values = [self.full(x) for x in values]
        for lane in np.arange(self.L)[self.lanes(m)]:
            yield lane, *(int(x[lane]) for x in values)

    def converged(self, m, line, size=32):
        """Return the indices of the active warps (groups of `size` lanes); raise Fault if one is partly active."""
        if m is None:
            return np.arange(self.L // size)
        groups = m.reshape(-1, size)
        if (groups.any(1) != groups.all(1)).any():
            raise Fault(f"line {line}: only some of {size} lanes take part")
        return np.flatnonzero(groups[:, 0])

    # Values

    def full(self, x):
        """Return an array with one element per lane, from an array or a single number."""
        if isinstance(x, np.ndarray) and x.ndim:
            return x
        key = x.dtype.str, x.tobytes()
        if key not in self.consts:
            self.consts[key] = np.full(self.L, x)
        return self.consts[key]

    def alike(self, m, x, line):
        """Return the number that x has in all active lanes; raise NotImplementedError if it differs between lanes."""
        found = self.full(x)[self.lanes(m)]
        if (found != found[0]).any():
            raise NotImplementedError(f"line {line}: lanes differ")
        return int(found[0])

    def spread(self, m, found):
        """Return an array (rows, active lanes) as (rows, all lanes), with 0 in the inactive lanes."""
        if m is None:
            return found
        result = np.zeros((len(found), self.L), found.dtype)
        result[:, self.lanes(m)] = found
        return result

    # Parameters of the kernel

    def param_address(self, name, dtype):
        """Return the address of a kernel parameter, for `param_at`."""
        return self.full(dtype(PARAMS_AT + 4096 * list(self.program.params).index(name)))

    def param_at(self, address):
        return self.params[list(self.program.params)[(address - PARAMS_AT) // 4096]]

    def load_param(self, name, offset, dtype):
        raw = self.params[name][offset : offset + dtype().itemsize]
        return self.full(np.frombuffer(raw, dtype)[0])
