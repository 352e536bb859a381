"""Calls at the edges, for each kernel that is broken: where a comparison that is off by one gives something else."""

import functools
import random
from collections.abc import Callable
from unittest import mock

import torch

import fusedattn as fa
from fusedattn.launch import run


def _dense(rows, keys, window, backend="triton", spread=1, multiprocessors=132):
    """A forward. With few multiprocessors programs of Hopper's kernel compute several blocks each."""
    torch.manual_seed(0)
    sizes = (2, rows), (1, keys), (1, keys)
    query, key, value = (torch.randn(1, h, n, 64).bfloat16().requires_grad_() for h, n in sizes)
    with mock.patch.object(run, "multiprocessors", lambda device: multiprocessors):
        fa.attention(query * spread, key, value, backend=backend, window=window, return_lse=True)


def _decoded(lengths, window, rows=2, spread=1):
    torch.manual_seed(0)
    query = torch.randn(len(lengths), 4, rows, 64).bfloat16() * spread
    caches = [torch.randn(len(lengths), 1, lengths[-1], 64).bfloat16() for _ in range(2)]
    for cache in caches:
        for keys, n in zip(cache, lengths, strict=True):
            keys[:, n:] = float("nan")
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
# Tensors that end within a tile of the first walk, at each part of it that a thread loads.
_EDGES += [edge for n in range(4, 64, 8) for edge in ((10, n, 2, 0), (n, 10, 0, 2))]
_WINDOWS = 0, 1, 2, 5, 17, 31, 32, 33, 63, 64, 65, 90, 127, 128, 300
_PEAKED = 64  # times as large, scores overflow where what is subtracted from them is not their maximum


def _attended(**options):
    """Those edges, and calls of any size between them."""
    draw = random.Random(0)
    edges = _EDGES + [
        (draw.randint(1, 200), draw.randint(1, 300), draw.choice(_WINDOWS), draw.choice(_WINDOWS)) for _ in range(45)
    ]
    return [
        functools.partial(
            _dense, rows, keys, (left, right), spread=_PEAKED if i % 8 == 7 or keys == 1 else 1, **options
        )
        for i, (rows, keys, left, right) in enumerate(edges)
    ]


def _cached():
    """Sixteen caches a call, the last one full: of 0 and 1 keys, of tiles and a few more or less, and of any length.

    Then caches that end at each part of the second of two blocks that a masked walk has. Each call has few enough rows
    for one kernel, decode_16.
    """
    draw = random.Random(0)
    calls = []
    for i, (full, left) in enumerate(_FULL):
        lengths = [n for n in _LENGTHS if n <= full]
        lengths += [draw.randint(0, full) for _ in range(15 - len(lengths))] + [full]
        spread = 1 if (i + 1) % 4 else _PEAKED
        calls.append(functools.partial(_decoded, lengths, (left, 0), rows=1 + i % 4, spread=spread))
    for full, left in ((134, 2), (148, 1), (164, 1), (182, 2)):
        calls += [functools.partial(_decoded, [full - 1, full], (x, 0), rows=4) for x in (left, 300)]
    return calls


_LENGTHS = 0, 1, 2, 3, 64, 65, 127, 129
_FULL = [(448, 300), (448, 63), (447, 63), (193, 0), (448, 10), (440, 448), (431, 1), (421, 64), (413, 65), (402, 190)]
_FULL += [(395, 2), (386, 128), (321, 320), (64, 1), (54, 90), (43, 2), (37, 0), (28, 64), (19, 1), (13, 300), (1, 0)]
CALLS: dict[str, list[Callable]] = {
    "forward": _attended(),
    "decode": _cached(),
    # More blocks of rows than programs, and of keys than stages: each mbarrier has many phases.
    "hopper": [
        functools.partial(_dense, 700, 600, (700, 600), backend="hopper", multiprocessors=2),
        *_attended(backend="hopper"),
    ],
}
