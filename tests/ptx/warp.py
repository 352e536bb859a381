"""Emulates instructions of a whole warp: shuffle, redux, elect, and loads, stores and products of small matrices."""

import numpy as np

from .ops import F32, S64, U16, U32, from_bf16, from_f16
from .report import Fault
from .shared import SharedMemory

REDUCTIONS = dict(min=np.minimum, max=np.maximum, add=np.add)


def floats(raw, kind):
    """Return elements of 16 or 32 bits as float32. tf32 drops the lower 13 bits."""
    if kind == "tf32":
        return (raw & U32(0xFFFFE000)).view(F32)
    return from_bf16(raw) if kind == "bf16" else from_f16(raw)


def transposed(words):
    """Return 8 x 8 matrices of 16-bit elements, stored as (.., 8, 4) words, transposed."""
    return np.ascontiguousarray(np.ascontiguousarray(words).view(U16).swapaxes(-1, -2)).view(U32)


def registers(sums):
    """Return the registers (n / 2, lanes) that hold sums (B, rows, n); each warp has 16 rows."""
    n = sums.shape[2]
    by_warp = sums.reshape(-1, 2, 8, n // 8, 4, 2)  # warp, half, row, columns, pair of columns, element
    return by_warp.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, -1)


def matrices(sums, rows):
    """Return the sums (B, rows, n) that are held in registers (n / 2, lanes)."""
    n = 2 * len(sums)
    by_register = sums.reshape(n // 8, 2, 2, -1, 8, 4)
    return by_register.transpose(3, 1, 4, 0, 5, 2).reshape(-1, rows, n)


class Warp(SharedMemory):
    """Instructions that all lanes of a warp must execute together."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.fragments = {}  # matrices by the ids of their register arrays: several products often use the same matrix

    def shuffle(self, m, how, x, b, c, line):
        """Return (value for each lane, mask of lanes whose source lane is in its segment) (shfl.sync)."""
        self.converged(m, line)
        lane, segment, clamp = np.arange(32), c >> 8 & 31, c & 31
        last = (lane & segment) | (clamp & ~segment)
        b = np.broadcast_to(b, self.L).reshape(-1, 32).astype(S64) & 31
        source = dict(bfly=lane ^ b, up=lane - b, idx=(lane & segment) | (b & ~segment))[how]
        valid = source >= last if how == "up" else source <= last
        found = np.take_along_axis(x.reshape(-1, 32), np.where(valid, source, lane), 1)
        return found.reshape(-1), valid.reshape(-1)

    def redux(self, m, how, x, members, line):
        """Return one result for the active lanes of each warp, which must be the lanes in `members` (redux.sync)."""
        active = np.ones((self.L // 32, 32), bool) if m is None else m.reshape(-1, 32)
        named = np.broadcast_to(members, self.L).reshape(-1, 32)
        bits = (active.astype(U32) << np.arange(32, dtype=U32)).sum(1, dtype=U32)  # a bit for each lane of a warp
        if ((named != bits[:, None]) & active).any():
            raise Fault(f"line {line}: the active lanes are not the named lanes")
        result = x.reshape(-1, 32).copy()
        for values, chosen in zip(result, active, strict=True):
            if chosen.any():
                values[:] = REDUCTIONS[how].reduce(values[chosen], dtype=x.dtype)
        return result.reshape(-1)

    def elect(self, m, line):
        """Return (the elected lane of each warp, mask of elected lanes) (elect.sync)."""
        self.converged(m, line)
        return np.zeros(self.L, U32), np.arange(self.L) % 32 == 0

    # Matrices of 8 rows of 16 bytes

    def matrix_rows(self, m, pointer, offset, count, line):
        """Return (warp, address in `smem`) of each matrix row; lane 8 * matrix + row holds its address."""
        lanes = (self.converged(m, line)[:, None] * 32 + np.arange(8 * count)).reshape(-1)
        return lanes // 32, self.smem_at(lanes, pointer, offset, 16, line)

    def ldmatrix(self, m, pointer, offset, count, transpose, line):
        """Load `count` 8 x 8 matrices from shared memory into registers (count, lanes) (ldmatrix)."""
        gwarp, at = self.matrix_rows(m, pointer, offset, count, line)
        self.reads(gwarp, at, 16, line)
        words = self.smem.view(U32)[at[:, None] // 4 + np.arange(4)].reshape(-1, count, 8, 4)  # warp, matrix, row
        words = transposed(words) if transpose else words
        return self.spread(m, words.reshape(-1, count, 32).swapaxes(0, 1).reshape(count, -1))

    def stmatrix(self, m, pointer, offset, values, transpose, line):
        count = len(values)
        gwarp, at = self.matrix_rows(m, pointer, offset, count, line)
        words = np.stack(values)[:, self.lanes(m)].reshape(count, -1, 8, 4).swapaxes(0, 1)
        words = transposed(words) if transpose else words
        self.put(gwarp, at, words.reshape(-1, 4).T, line)

    def fragment(self, registers, kind, shape):
        """Return the matrices (warps, *shape) that registers hold as operand A, (16, k), or B, (8, k)."""
        key = kind, shape, *map(id, registers)
        if key not in self.fragments:
            raw = np.stack(registers).view(U32 if kind == "tf32" else U16)
            halves = shape[0] // 8  # of 8 rows; axes: register, half, warp, row, pair of lanes, element
            x = floats(raw, kind).reshape(len(registers) // halves, halves, self.L // 32, 8, 4, -1)
            found = np.ascontiguousarray(x.transpose(2, 1, 3, 0, 4, 5)).reshape(-1, *shape)
            if len(self.fragments) > 512:
                self.fragments.clear()
            self.fragments[key] = registers, found  # keeps the arrays alive, so that their ids stay unique
        return self.fragments[key][1]

    def mma(self, m, shape, kind, a, b, c, line):
        """Return c + a @ b for small matrices in the registers of each warp (mma.sync)."""
        self.converged(m, line)
        k = int(shape.split("k")[1])
        return list(self.plus(np.stack(c), self.fragment(a, kind, (16, k)), self.fragment(b, kind, (8, k)), kind))

    def plus(self, sums, left, right, kind):
        """Return the registers of sums plus the products of (B, rows, k) and transposed (B, n, k)."""
        if self.tensor_core is None:
            return sums + registers(np.matmul(left, right.swapaxes(1, 2)))
        return registers(self.tensor_core.plus(matrices(sums, left.shape[1]), left, right, kind))
