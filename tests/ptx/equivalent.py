"""Mutants that do the same as the right code in every call, so that nobody can see them, with the reason of each."""

from typing import NamedTuple

from .edges import CALLS
from .mutations import Mutant

NEVER_NEGATIVE = "what is shifted is never negative: a length, a row, a program, or at least 0 by a maximum"
FIRST_COLUMN = "in the last walk this bound holds, with equality in its first column or row alone"
NO_BLOCK = "of a walk that is over: it copies rows that exist, by another guard, to where nobody reads any more"
UNGUARDED = "a tile of the unmasked walk lies within the tensor, so that its guard always holds"
SAME_NUMBER = "the lanes hold the same maximum or sum, or store to where nobody reads it"
BETWEEN_WALKS = "another barrier stands between what is read before it and what is written behind it"
ALL_WAITED = "each step of the loop before it waits for all of its products"
OWN_WARP = "each warp reads what it wrote itself, and a warp that has not parted executes in order"
FENCED_AGAIN = "each step of the loop behind it fences again, before its first product"
TWO_BLOCKS = "a masked walk of decode has at most two blocks, which are copied before its loop"
ONE_STEP = "a last walk without a block does one step on zeros, of which the bound hides each pair"
FIRST_USE = "keys and values are copied once, to where nothing has been"
WAITS_ITSELF = "each thread behind it waits for the mbarrier itself"
K_BEFORE_V = "what overwrites these keys is copied behind values, for which there is another barrier further on"
NO_WARP = "no warp comes there: of four warps that copy three sleep"
OWN_ROWS = "each warp overwrites rows of a left operand that it alone has read"
OF_A_PHASE = "the parity of a phase is its last bit"
WAITED_LATER = "sums that are only added to, and registers that nothing writes before a later wait"
MASKED_TOO = "one tile more is masked, of which nothing is hidden"
IN_PAIRS = "there is no single step: a tile has two"
NOT_STORED = "what a key past the end gives is not stored"


class Equivalent(NamedTuple):
    """Mutants by a mutation, of a line of a kernel that begins so, and the reason; in some parts of it, or in all."""

    mutation: str
    source: str
    reason: str
    kernels: tuple = tuple(CALLS)
    parts: tuple = ()
    text: str = ""  # in the line of PTX

    def is_one(self, kernel: str, mutant: Mutant) -> bool:
        """Whether a mutant of a kernel is such a one."""
        return (
            kernel in self.kernels
            and mutant.mutation.name == self.mutation
            and mutant.source.startswith(self.source)
            and (not self.parts or mutant.part in self.parts)
            and self.text in mutant.text
        )


LOOPS = dict(
    forward="forward.py: for n in tl.range(begin, end)",
    dkdv="dkdv.py: for n in tl.range(0, (end - begin) * GROUP",
    dq="dq.py: for n in tl.range(begin, end)",
    decode="decode.py: for j in tl.range(begin, end)",
)
INSIDE = "span.py: return (c >= r + b.low)"

EQUIVALENT = (
    *(
        Equivalent("unsigned shift", source, NEVER_NEGATIVE)
        for source in (
            "span.py: blocks = tl.cdiv(length, BLOCK)",
            "span.py: index = pid // blocks",
            "span.py: return pid % blocks, Plane(index // heads, index % heads",
            "span.py: return Plane(plane.batch, plane.head // GROUP",
            "span.py: return (tl.cdiv(length, BLOCK) - 1 - block) * BLOCK",
            "span.py: begin = tl.maximum(first + b.low, 0) // BLOCK",
            "span.py: end = tl.cdiv(tl.maximum(",
            "span.py: full = tl.cdiv(tl.maximum(",
            "span.py: full_end = tl.maximum(",
            "decode.py: rows, member = folded // GROUP, folded % GROUP",
            "decode.py: block, kv = span.place(tl.program_id(0) // splits",
            "decode.py: ranges = span.blocks(band, first // GROUP",
            "forward.py: blocks, paired = gl.cdiv(q_len",
        )
    ),
    *(
        Equivalent(name, source, NO_BLOCK, (kernel,), ("before 0", "in 0", "before 2", "in 2"))
        for kernel, source in LOOPS.items()
        for name in ("copied unconditionally", "<= for <", ">= for >")
    ),
    *(
        Equivalent("barrier left out", source, BETWEEN_WALKS, (kernel,), ("before 1", "before 2", "before 3"))
        for kernel, source in LOOPS.items()
    ),
    Equivalent("product not waited for", LOOPS["dkdv"], ALL_WAITED, ("dkdv",), ("before 1", "before 2", "before 3")),
    Equivalent("> for >=", INSIDE, FIRST_COLUMN, ("forward", "dq", "decode"), ("in 2",)),
    Equivalent("< for <=", INSIDE, FIRST_COLUMN, ("dkdv",), ("in 2",)),
    Equivalent("added by all", "tiles.py: ", UNGUARDED, ("dkdv",), ("in 1",)),
    Equivalent("<= for <", "tiles.py: even, odd = tl.split(", UNGUARDED, ("dkdv",), ("in 1",)),
    Equivalent(">= for >", "span.py: return begin, full, tl.where(n <= length", MASKED_TOO, ("dkdv",)),
    *(
        Equivalent("stored by all", source, SAME_NUMBER, ("decode",), text="st.shared")
        for source in ("decode.py: for j in tl.range(begin, end)", "tiles.py: return tl.load(pointers(m, r, c), mask=")
    ),
    *(
        Equivalent(name, "masks.py: exists = c < n", TWO_BLOCKS, ("decode",), ("in 0", "in 2"))
        for name in ("copied unconditionally", "<= for <")
    ),
    *(Equivalent("> for >=", source, ONE_STEP, (kernel,), ("before 2",)) for kernel, source in LOOPS.items()),
    *(
        Equivalent("proxy fence left out", source, FENCED_AGAIN, parts=("before 0", "before 1", "before 2"))
        for source in (
            "attend.py: x = tl.dot(q, k_tile.T",
            "dq.py: x = tl.dot(q, k_tile.T",
            "dkdv.py: x = tl.dot(k, q.T",
        )
    ),
    Equivalent("barrier left out", "ring.py: mbarrier.wait(", WAITS_ITSELF, ("hopper",)),
    Equivalent("barrier left out", "ring.py: mbarrier.arrive(ring.free", K_BEFORE_V, ("hopper",), ("in 0", "in 2")),
    Equivalent("barrier left out", "forward.py: for n in range(schedule.share", NO_WARP, ("hopper",), ("in 9",)),
    Equivalent("barrier left out", "forward.py: tile.reshape", OWN_ROWS, ("hopper",)),
    Equivalent("barrier left out", "steps.py: return gl.where(seen, p, 0.0)", NO_WARP, ("hopper_bwd",), ("in 2",)),
    Equivalent("mbarrier not waited for", "ring.py: mbarrier.wait(ring.free", FIRST_USE, ("hopper_bwd",), ("in 7",)),
    Equivalent(">= for >", "backward.py: for step in range(", MASKED_TOO, ("hopper_bwd",), ("in 3",)),
    Equivalent(
        "> for >=", "steps.py: if (block < full)", MASKED_TOO, ("hopper_bwd", "hopper_bwd_256", "hopper_stored")
    ),
    Equivalent(">= for >", "span.py: return begin, full, tl.where(n <=", MASKED_TOO, ("hopper_bwd",), ("before 0",)),
    Equivalent("a bit of a swizzle", "ring.py: mbarrier.wait(ring.free", OF_A_PHASE, ("hopper_bwd",)),
    Equivalent("product not waited for", "halves.py: dp1, dk, ds0 =", WAITED_LATER, ("hopper_bwd",)),
    Equivalent("product not waited for", "halves.py: s1, dv, w0 =", WAITED_LATER, ("hopper_bwd",)),
    # Of two such comparisons the one in the loop: that of the first step is another half of the condition.
    Equivalent(">= for >", "wide.py: if steps > 0", MASKED_TOO, ("hopper_bwd_256",), ("in 2",)),
    Equivalent("barrier left out", "ring.py: mbarrier.wait(", WAITS_ITSELF, ("hopper_bwd_256",), ("in 9",)),
    Equivalent("unsigned shift", "backward.py: for step in range(", NEVER_NEGATIVE, ("hopper_bwd",)),
    Equivalent("unsigned shift", "stored.py: ", NEVER_NEGATIVE),
    Equivalent("<= for <", "span.py: return tl.where(c < b.keys,", NOT_STORED, ("hopper_stored",)),
    Equivalent(">= for >", "span.py: return begin, full, tl.where(n <=", MASKED_TOO, ("hopper_stored",)),
    Equivalent("barrier left out", "stored.py: half(v, 1).store(", OWN_ROWS, ("hopper_stored",)),
    Equivalent("<= for <", "stored.py: for step in range(", IN_PAIRS, ("hopper_stored",)),
    Equivalent("barrier left out", "softmax.py: return tl.math.exp2(", OWN_WARP, ("dq",), ("before 0",)),
    Equivalent("barrier left out", "gradient.py: return dropping.before(", OWN_WARP, ("dq",), ("before 0",)),
)


def reason(kernel: str, mutant: Mutant) -> str | None:
    """Why a mutant of a kernel does the same as the right code, or None if it need not."""
    return next((each.reason for each in EQUIVALENT if each.is_one(kernel, mutant)), None)
