"""Limits of sizes and grids, because kernels count in 32 bits. Backends ask for them, and each launch checks them."""

from ..call import bits
from ..call.options import Call, hiding, sizes
from ..call.private import known
from .failures import KernelUnavailable

MOST_POSITIONS = 2**31 - 1024  # kernels count rows, keys and shift in 32 bits, up to the end of the last tile
MOST_PROGRAMS = 2**31 - 1


def _marked_blocks(call: Call) -> int:
    """Return an upper bound on the number of blocks in the block mask of a call; 0 if it needs no block mask."""
    tensors = [x for x in hiding(call) if x is not None]
    if call.block_mask is not None or not tensors:
        return 0
    batch, heads, rows, keys = sizes(call)
    shared = all(x.dim() < 4 or known(x.shape[1] == 1, False) or known(x.stride(1) == 0, False) for x in tensors)
    size = bits.BLOCK
    return batch * (1 if shared else heads) * -(-rows // size) * -(-keys // size)


def limits(call: Call, added: int | None = None) -> list[str]:
    """Return the reasons why a call is too large, or []. added: the number of new keys of a Decode."""
    (batch, heads, rows, _), keys, reasons = call.query.shape, call.key.shape[2], []
    if known(rows + keys > MOST_POSITIONS, False):
        reasons.append("rows and keys together exceed 2**31")
    # No tile has fewer than 16 rows or keys. Each packed sequence starts a new block.
    packed = 0 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0]
    blocks = [batch * -(-x // 16) + packed for x in (rows, keys)] if added is None else [batch * rows, batch * added]
    if any(known(x * heads > MOST_PROGRAMS, False) for x in blocks):
        reasons.append("the grid would exceed 2**31 programs")
    if added is None and known(_marked_blocks(call) > MOST_PROGRAMS, False):
        reasons.append("its block mask would exceed 2**31 blocks")
    return reasons


def check(call: Call, added: int | None = None) -> None:
    """Raise KernelUnavailable if a call is too large: a graph's backend is chosen before its sizes are known."""
    if reasons := limits(call, added):
        raise KernelUnavailable(reasons[0])
