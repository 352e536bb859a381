"""Forms of our own kernels that are timed side by side, each a provider.

fusedattn:hopper/FORM is the forward for Hopper by one of its pipelines, fusedattn:backward/FORM the backward in two
passes, or in one by one of its tiles.
"""

import contextlib
import functools
from unittest import mock

import torch

from fusedattn.launch import tiles as configs

PIPELINE, BACKWARD = "fusedattn:hopper/", "fusedattn:backward/"
TWO = "two-passes"


def pipeline_name(taken):
    """A Pipeline, as 128x64s4+pingpong: rows x keys of a block, stages; +grid is one block of rows a program."""
    words = ("" if taken.persistent else "+grid") + ("+pingpong" if taken.ping_pong else "")
    return f"{taken.rows}x{taken.keys}s{taken.stages}{words}"


def tile_name(tile):
    """A Tile, as 64x128w8s2+bulk: rows x keys, warps, stages; +bulk is dq by the copy engine."""
    return f"{tile.rows}x{tile.keys}w{tile.warps}s{tile.stages}" + "+bulk" * tile.bulk


def _widths(known, case):
    """Those of a table that a case takes, or all."""
    if case is None:
        return sorted(known)
    return [width for width in sorted(known) if max(case.D, case.Dv) <= width][:1]


def pipelines(case=None):
    """{name: Pipeline} of those that `configs` has for the width of a case, or of all."""
    return {pipeline_name(taken): taken for width in _widths(configs.HOPPER, case) for taken in configs.HOPPER[width]}


def backwards(case=None):
    """{name: Tile} of the backward in one pass at the width of a case, or of all; None is two passes.

    They are the tiles of Hopper, with dq added by the copy engine and by the threads.
    """
    known = {width: configs.tiles("one_pass", 90, 2, width) for width in (64, 128)}
    tiles = [tile for width in _widths(known, case) for tile in known[width]]
    both = [tile._replace(spills=0, bulk=bulk) for bulk in (True, False) for tile in tiles]
    return {TWO: None} | {tile_name(tile): tile for tile in both}


_FORMS = {PIPELINE: pipelines, BACKWARD: backwards}


def _parted(name):
    """(prefix, form) of the name of a provider; None where it is no form of ours."""
    return next(((prefix, name.removeprefix(prefix)) for prefix in _FORMS if name.startswith(prefix)), None)


def known(name):
    """Whether a provider is a form that there is; one that there is not is an error."""
    parts = _parted(name)
    if parts is None:
        return False
    prefix, form = parts
    if form not in _FORMS[prefix]():
        raise ValueError(f"provider: expected one of {', '.join(_FORMS[prefix]())} after {prefix}, got {form}")
    return True


def concerns(name, case):
    """Whether a provider has anything to say of a case: a form has not, if it is for another width."""
    parts = _parted(name)
    return parts is None or parts[1] in _FORMS[parts[0]](case)


def backend(name):
    """The backend that a form is one of."""
    return "hopper" if name.startswith(PIPELINE) else "triton"


def inside(name):
    """What makes the context in which calls take a form."""
    prefix, form = _parted(name)
    if prefix == PIPELINE:
        return functools.partial(by_pipeline, pipelines()[form])
    return in_two_passes if form == TWO else functools.partial(only, "one_pass", backwards()[form])


@contextlib.contextmanager
def _anew(*patches):
    """What calls are made of is another, and was as before when it is left."""
    from fusedattn.replay import cache  # imports Triton, which forms are of, and this file is not

    cache.forget()
    try:
        with contextlib.ExitStack() as within:
            for patch in patches:
                within.enter_context(patch)
            yield
    finally:
        cache.forget()


def by_pipeline(taken):
    """The kernel for Hopper works by one pipeline, whatever the width."""
    return _anew(mock.patch.object(configs, "HOPPER", dict.fromkeys(configs.HOPPER, (taken,))))


def only(kernel, tile):
    """Calls launch a kernel with this tile alone, and the others with theirs."""
    from fusedattn.launch import run

    given = run.candidates
    taken = mock.patch.object(run, "candidates", lambda name, call: (tile,) if name == kernel else given(name, call))
    return _anew(taken)


def in_two_passes():
    """The backward gives the same bits each time; what else torch computes need not."""
    return _anew(mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True))
