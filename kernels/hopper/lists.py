"""Tile lists of a program of the backward: the blocks of rows, in each query head of a group, that see its keys."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary import walk


class Lists(NamedTuple):
    """Steps of a program: `count` of them. Step i is the entry at partial + i if i < masked, otherwise at full + i."""

    count: gl.tensor
    masked: gl.tensor
    partial: gl.tensor
    full: gl.tensor


@gluon.jit
def lists(tile_lists, plane, block):
    partial, full = walk.tile_list(tile_lists, plane, block, 0), walk.tile_list(tile_lists, plane, block, 1)
    masked = walk.extent((), partial, 0)[1]
    return Lists(masked + walk.extent((), full, 1)[1], masked, partial, full - masked)


@gluon.jit
def entry(lists, i):
    """Load the entry of step i; 0 past the last."""
    return gl.load(gl.where(i < lists.masked, lists.partial, lists.full) + i, mask=i < lists.count, other=0)
