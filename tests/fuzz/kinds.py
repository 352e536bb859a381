"""All kinds of calls that are drawn: what draws one, what holds it, and its share of all draws."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from fusedattn.replay import cache

from . import cached, held, merged, mistakes, modules, strategies


class Kind(NamedTuple):
    """calls(name) is a strategy; hold(call, tally) raises for a call that is wrong. share: of 100."""

    calls: Callable[[str], Any]
    hold: Callable[..., None]
    share: float


_DENSE = {
    "attention": 24, "attention_varlen": 11, "rank 3": 3, "rank 2": 3, "jagged": 4, "vmap": 5, "flipped": 3, "ones": 3,
    "merge": 4, "sdpa": 7, "flash": 3, "flash, one width": 1.5, "flash, one width, square": 1.5, "flash varlen": 3,
    "flash varlen, one width": 1,
}  # fmt: skip
KINDS = {name: Kind(strategies.calls, held.hold, share) for name, share in _DENSE.items()}
KINDS |= {name: Kind(cached.calls, cached.hold, share) for name, share in (("decode", 9), ("flash cache", 3))}
_MODULES = ("MultiHeadAttention", 3), ("SelfAttention", 1.5), ("MultiheadAttention", 3)
KINDS |= {name: Kind(modules.calls, modules.hold, share) for name, share in _MODULES}
KINDS |= {"two results": Kind(merged.calls, merged.hold, 1), "mistakes": Kind(mistakes.calls, mistakes.hold, 1.5)}


def hold(name, call, tally=None):
    """Hold one call of a kind; as any program would, it is recorded at once or at its second time."""
    cache.forget()
    kept, cache.RECORD_AFTER = cache.RECORD_AFTER, 1 + zlib.crc32(repr(call).encode()) % 2
    try:
        KINDS[name].hold(call, tally)
    finally:
        cache.RECORD_AFTER = kept
