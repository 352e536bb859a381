"""Tiles that the copy engine loads have the bits of those that threads load, which they do where the engine cannot."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa  # noqa: E402
from fusedattn.launch import arguments  # noqa: E402
from fusedattn.testing.compare import with_gradients  # noqa: E402

from ..cases import Case  # noqa: E402
from ..sample import one_in  # noqa: E402
from ..sequences import draw_packed, leaves, offsets  # noqa: E402

BASE = Case("described", B=1, Hq=2, Hkv=1, Sq=35, Sk=51, D=16, Dv=16, dtype=torch.float16)
# {name: (fields of the case, whether keys and values are loaded by descriptor, whether queries and gradients are)}
CALLS = {
    "plain": ({}, True, True),
    "causal, narrow heads": (dict(causal=True, D=24, Dv=8), True, True),
    "window, options": (dict(window=(9, 3), softcap=2.0, alibi="own", dropout=0.2), True, True),
    "a mask of pairs": (dict(B=2, mask="pairs"), True, True),
    "hidden keys": (dict(key_mask="own"), False, True),
    "hidden rows": (dict(query_mask="own"), True, False),
    "few bytes a row": (dict(D=5), False, False),
    "expanded": (dict(expanded=True), False, False),
}


@pytest.fixture
def made(monkeypatch, device, tiles):
    """A list of (shape, rows of a block) of the descriptors that are made."""
    if device == "cuda":
        pytest.skip("fusedattn tune checks these tiles on GPUs that have a copy engine")
    rows, descriptor = [], arguments.descriptor
    monkeypatch.setattr(arguments, "descriptor", lambda x, n: rows.append((tuple(x.shape), n)) or descriptor(x, n))
    return rows


@pytest.fixture
def by_threads(tiles, made):
    """by_threads(call) computes a call by pointers; after it all tiles of the interpreter load by descriptor."""

    def compute(call):
        found = call()
        assert not made
        tiles.change("forward", "dq", "dkdv", "one_pass", tma=True)
        return found

    return compute


@pytest.mark.parametrize(
    "name, two_passes", one_in(2, [pytest.param(name, number % 4 == 2) for number, name in enumerate(CALLS)])
)
@pytest.mark.one_in(2)
def test_a_descriptor_loads_what_pointers_load(name, two_passes, made, by_threads, device, poison, passes):
    passes(1 + two_passes)
    fields, of_keys, of_rows = CALLS[name]
    tensors, options = BASE._replace(**fields).draw(device)

    def call():
        return with_gradients(fa.attention, tensors, options, backend="triton")

    want = by_threads(call)
    for _ in range(2):  # the last is a repeated call
        got = call()
        assert all(torch.equal(got[x], want[x]) for x in want)
    rows, keys = tensors["query"].shape[2], tensors["key"].shape[2]
    walked = {shape[2] for shape, _ in made}
    assert (keys in walked) == of_keys and (rows in walked) == of_rows


def test_a_packed_sequence_does_not_see_its_neighbours(made, by_threads, device):
    rows, keys = (20, 33, 9), (7, 40, 16)
    query, key, value, grad = draw_packed(rows, keys, device, dtype=torch.float16, dims=(16, 16))
    where = offsets(rows, device), offsets(keys, device)

    def call(value=value):
        inputs = leaves(query, key, value)
        out = fa.attention_varlen(*inputs, *where, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    want, got = by_threads(call), call()
    assert made and all(map(torch.equal, got, want))
    spoiled = value.detach().clone()
    spoiled[7:] = float("nan")
    ends = (20, 20, 7, 7)
    for a, b, end in zip(call(spoiled), want, ends, strict=True):
        assert torch.equal(a[:end], b[:end])


def test_tensors_that_lie_where_the_copy_engine_cannot_read_are_loaded_by_threads(made, by_threads, device):
    query, key, value = (torch.randn(1, 2, 33, 16, device=device).half() for _ in range(3))
    want = by_threads(lambda: fa.attention(query, key, value, backend="triton"))
    assert torch.equal(fa.attention(query, key, value, backend="triton"), want) and made
    made.clear()
    moved = torch.empty(key.numel() + 1, dtype=key.dtype, device=device)[1:].view_as(key).copy_(key)
    assert torch.equal(fa.attention(query, moved, value, backend="triton"), want) and not made
