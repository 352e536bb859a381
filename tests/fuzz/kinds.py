"""Kinds of random calls, each with its hypothesis strategy and its check."""

import zlib
from unittest import mock

from fusedattn.dispatch import replay

from . import cached, held, modules, routes, strategies

# {name: (function of the name that returns a strategy, function that checks a call, share of draws)}
KINDS = dict.fromkeys(routes.ROUTES, (strategies.calls, held.hold, 1))
KINDS |= {"attention": (strategies.calls, held.hold, 5), "attention_varlen": (strategies.calls, held.hold, 2)}
KINDS |= {"decode": (cached.calls, cached.hold, 2)}
KINDS |= dict.fromkeys(modules.MODULES, (modules.calls, modules.hold, 1))


def hold(name, call):
    """Check one random call of a kind (`name`); its first or its second execution is recorded for replays."""
    replay.forget()
    with mock.patch.object(replay, "RECORD_AFTER", 1 + zlib.crc32(repr(call).encode()) % 2):
        KINDS[name][1](call)
