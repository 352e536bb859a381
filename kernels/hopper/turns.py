"""Turns in which programs add to the same tile in memory, so that the order of additions is fixed.

Source: the deterministic backward of FlashAttention-3, https://github.com/Dao-AILab/flash-attention.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait(counter, turn):
    """Wait until the tile's counter is `turn`, and make the writes of earlier programs visible.

    If unchecked offsets make sequences overlap, the counter may be larger.
    """
    now = gl.load(counter, volatile=True)
    while now < turn:
        now = gl.load(counter, volatile=True)
    _execute("fence.acq_rel.gpu; fence.proxy.async.global;", turn)


@gluon.jit
def end(counter, turn, by):
    """Wait for the TMA writes of all threads of this warp, then increase the counter, so that the next program adds."""
    _execute("cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync -1;", turn)
    gl.atomic_add(counter, by, sem="release", scope="gpu")


@gluon.jit
def _execute(instructions: gl.constexpr, operand):
    gl.inline_asm_elementwise(
        instructions + " mov.b32 $0, $1;", "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1
    )
