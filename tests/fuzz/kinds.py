"""All kinds of calls that are drawn: what draws one, and what holds it."""

import zlib
from unittest import mock

from fusedattn.dispatch import replay

from . import cached, held, modules, routes, strategies

# {name: (a strategy of the name, a function that raises for a call that is wrong, the share of draws)}
KINDS = dict.fromkeys(routes.ROUTES, (strategies.calls, held.hold, 1))
KINDS |= {"attention": (strategies.calls, held.hold, 5), "attention_varlen": (strategies.calls, held.hold, 2)}
KINDS |= {"decode": (cached.calls, cached.hold, 2)}
KINDS |= dict.fromkeys(modules.MODULES, (modules.calls, modules.hold, 1))


def hold(name, call):
    """Hold one call of a kind; as any program would, it is recorded at once or at its second time."""
    replay.forget()
    with mock.patch.object(replay, "RECORD_AFTER", 1 + zlib.crc32(repr(call).encode()) % 2):
        KINDS[name][1](call)
