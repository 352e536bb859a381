"""Calls at the edges, for each kernel that is broken: where a comparison that is off by one gives something else."""

import functools
import random
from collections.abc import Callable
from unittest import mock

import torch

import fusedattn as fa
from fusedattn.launch import run


def _dense(rows, keys, backend="triton", two_passes=False, **options):
    torch.manual_seed(0)
    sizes = (2, rows), (1, keys), (1, keys)
    query, key, value = (torch.randn(1, h, n, 64).bfloat16().requires_grad_() for h, n in sizes)
    torch.use_deterministic_algorithms(two_passes)
    try:
        out, _ = fa.attention(query, key, value, backend=backend, return_lse=True, **options)
        torch.autograd.grad(out, (query, key, value), torch.randn_like(out))
    finally:
        torch.use_deterministic_algorithms(False)


def _decoded(lengths, window, rows=2):
    torch.manual_seed(0)
    query = torch.randn(len(lengths), 4, rows, 64).bfloat16()
    caches = [torch.randn(len(lengths), 1, 448, 64).bfloat16() for _ in range(2)]
    options = dict(window=window, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), return_lse=True)
    with mock.patch.object(run, "multiprocessors", lambda device: 1):  # so few that keys are not split
        fa.attention_decode(query, *caches, backend="triton", **options)


# Rows, keys, and the keys that are seen to the left and to the right. Tiles have 32, 64 or 128 rows and keys.
_EDGES = [
    (200, 300, 130, 90), (129, 127, 128, 0), (65, 1, 1, 64), (1, 65, 64, 1), (64, 64, 0, 0), (63, 320, 300, 300),
    (127, 129, 64, 63), (257, 193, 63, 64), (192, 256, 127, 128), (128, 128, 127, 127),
    (250, 250, 2, 1), (190, 254, 0, 0), (131, 259, 1, 0), (259, 131, 0, 1), (70, 200, 40, 150),
    (5, 129, 0, 0), (12, 129, 0, 0), (129, 5, 0, 0), (129, 12, 0, 0),
]  # fmt: skip
_WINDOWS = 0, 1, 2, 5, 17, 31, 32, 33, 63, 64, 65, 90, 127, 128, 300


def _attended(**options):
    """Those edges, and calls of any size between them."""
    draw = random.Random(0)
    edges = _EDGES + [
        (draw.randint(1, 200), draw.randint(1, 300), draw.choice(_WINDOWS), draw.choice(_WINDOWS)) for _ in range(45)
    ]
    return [
        functools.partial(_dense, rows=rows, keys=keys, window=(left, right), **options)
        for rows, keys, left, right in edges
    ]


def _cached():
    """Lengths of 0, 1 and around tiles, and 160 others, 16 at a time."""
    draw = random.Random(0)
    lengths = [0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 191, 192, 193, 446, 447, 448]
    lengths += [draw.randint(0, 448) for _ in range(160)]
    windows = (300, 63, 0, 448, 1, 64, 65, 190, 2, 128, 320)
    return [
        functools.partial(_decoded, lengths[16 * i : 16 * i + 16], (left, 0), rows=1 + i % 7)
        for i, left in enumerate(windows)
    ]


CALLS: dict[str, list[Callable]] = {
    "forward": _attended(),
    "dkdv": _attended(),
    "dq": _attended(two_passes=True),
    "decode": _cached(),
    "hopper": _attended(backend="hopper"),
}
