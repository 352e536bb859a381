"""Tiles that the copy engine loads have the bits of those that threads load, which they do where the engine cannot."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa  # noqa: E402
from fusedattn.dispatch import replay  # noqa: E402
from fusedattn.launch import arguments, tile_table  # noqa: E402
from fusedattn.testing.compare import with_gradients  # noqa: E402

from ..cases import Case  # noqa: E402
from ..sample import one_in  # noqa: E402
from ..sequences import draw_packed, leaves, offsets  # noqa: E402

KERNELS = ("forward", "dq", "dkdv", "one_pass")
BASE = Case("described", B=2, Hq=4, Hkv=2, Sq=37, Sk=51, D=16, Dv=16, dtype=torch.float16)
# {name: (fields of the case, whether keys and values are loaded by descriptor, whether queries and gradients are)}
CALLS = {
    "plain": ({}, True, True),
    "causal, narrow heads": (dict(causal=True, D=24, Dv=8), True, True),
    "window, options": (dict(window=(9, 3), softcap=2.0, alibi="own", dropout=0.2), True, True),
    "a mask of pairs": (dict(mask="pairs"), True, True),
    "hidden keys": (dict(key_mask="own"), False, True),
    "hidden rows": (dict(query_mask="own"), True, False),
    "few bytes a row": (dict(D=5), False, False),
    "expanded": (dict(expanded=True), False, False),
}


@pytest.fixture
def made(monkeypatch, device):
    """All tiles of the interpreter load by descriptor; the rows of the blocks of each descriptor that was made."""
    if device == "cuda":
        pytest.skip("fusedattn tune checks these tiles on GPUs that have a copy engine")
    for name in KERNELS:
        changed = tuple(tile._replace(tma=True) for tile in tile_table.INTERPRETED[name])
        monkeypatch.setitem(tile_table.INTERPRETED, name, changed)
    monkeypatch.setattr(tile_table, "fitting", {})
    replay.forget()
    rows, descriptor = [], arguments.descriptor
    monkeypatch.setattr(arguments, "descriptor", lambda x, n: rows.append((tuple(x.shape), n)) or descriptor(x, n))
    yield rows
    replay.forget()


def by_threads(call):
    """What a call gives where no tile loads by descriptor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "described", lambda *of, **tensors: {})
        replay.forget()
        return call()


@pytest.mark.parametrize(
    "name, two_passes", one_in(2, [pytest.param(name, number % 4 == 2) for number, name in enumerate(CALLS)])
)
@pytest.mark.one_in(2)
def test_a_descriptor_loads_what_pointers_load(name, two_passes, made, device, poison, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: two_passes)
    fields, of_keys, of_rows = CALLS[name]
    tensors, options = BASE._replace(**fields).draw(device)

    def call():
        return with_gradients(fa.attention, tensors, options, backend="triton")

    want = by_threads(call)
    assert not made
    replay.forget()
    for _ in range(3):  # the last is a repeated call
        got = call()
        assert all(torch.equal(got[x], want[x]) for x in want)
    rows, keys = tensors["query"].shape[2], tensors["key"].shape[2]
    walked = {shape[2] for shape, _ in made}
    assert (keys in walked) == of_keys and (rows in walked) == of_rows


def test_a_packed_sequence_does_not_see_its_neighbours(made, device):
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


@pytest.mark.parametrize("two_passes", [False, True])
def test_no_keys_are_no_descriptor(two_passes, made, device, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: two_passes)
    query, key = (torch.randn(1, 2, n, 16, device=device).half().requires_grad_() for n in (33, 0))
    lengths = torch.tensor([0, 33], device=device, dtype=torch.int32), torch.zeros(2, device=device, dtype=torch.int32)
    packed = (x[0].transpose(0, 1) for x in (query, key, key))
    for out, lse in (
        fa.attention(query, key, key, return_lse=True, backend="triton"),
        fa.attention_varlen(*packed, *lengths, return_lse=True, backend="triton"),
    ):
        assert not out.any() and (lse == -float("inf")).all()
        assert not any(x.any() for x in torch.autograd.grad(out.sum(), (query, key)))


def test_tensors_that_lie_where_the_copy_engine_cannot_read_are_loaded_by_threads(made, device):
    query, key, value = (torch.randn(1, 2, 33, 16, device=device).half() for _ in range(3))
    want = fa.attention(query, key, value, backend="triton")
    count = len(made)
    moved = torch.empty(key.numel() + 1, dtype=key.dtype, device=device)[1:].view_as(key).copy_(key)
    replay.forget()
    assert count and torch.equal(fa.attention(query, moved, value, backend="triton"), want) and len(made) == count
