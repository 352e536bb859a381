"""Tests block masks: their values, that hidden blocks are skipped, and that results do not change."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.launch.blocks import marked
from fusedattn.testing.compare import with_gradients

from ..cases import Case
from ..close import assert_computes, assert_like
from ..inside import fields
from ..sample import one_in, product

pytestmark = pytest.mark.usefixtures("deterministic")

NONE, ALL, SOME = 0, 1, 2


@pytest.fixture
def grain(device):
    """Return the number of rows, and of keys, in a block of a device's block masks."""
    return 512 // fa.plan(torch.ones(1, 512, dtype=torch.bool, device=device)).block_mask.shape[-1]


def by_hand(mask, grain):
    batch, heads, rows, keys = mask.shape
    block_mask = torch.zeros(batch, heads, -(-rows // grain), -(-keys // grain), dtype=torch.int32)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in block_mask.shape)).tolist():
        block = mask[b, h, i * grain : (i + 1) * grain, j * grain : (j + 1) * grain]
        block_mask[b, h, i, j] = ALL if block.all() else SOME if block.any() else NONE
    return block_mask


def blocky(*shape, device, grain):
    """Return a random mask with blocks that are all True, all False, or mixed."""
    coarse = torch.randint(3, [*shape[:2], *(-(-n // grain) for n in shape[2:])], device=device)
    whole = coarse.repeat_interleave(grain, 2).repeat_interleave(grain, 3)[:, :, : shape[2], : shape[3]]
    return torch.where(whole == 2, torch.rand(shape, device=device) < 0.5, whole.bool())


def marks(mask, **tokens):
    """Return the block mask that a call computes, as NONE, ALL or SOME."""
    query, key = (mask.new_empty(1, 1, n, 1) for n in mask.shape[2:])
    return marked(fields(query, key, key, mask=mask, **tokens)).block_mask.cpu().clamp(max=SOME)


@pytest.mark.parametrize("shape", [(2, 3, 64, 128), (1, 1, 33, 17), (2, 1, 1, 50), (1, 2, 50, 1)], ids=str)
def test_marks_of_a_mask(shape, device, grain):
    mask = torch.nn.functional.pad(blocky(*shape, device=device, grain=grain).flatten(), (1, 0))[1:].view(shape)
    plan, want = fa.plan(mask), by_hand(mask.cpu(), grain)
    assert all(torch.equal(x, want) for x in (plan.block_mask.cpu().clamp(max=SOME), marks(mask)))
    assert plan.density == pytest.approx(mask.double().mean().item())


def test_marks_of_all_masks_together(device, grain):
    mask = blocky(1, 2, 50, 70, device=device, grain=grain)
    key_mask, query_mask = (torch.arange(n, device=device)[None] < m for n, m in ((70, 40), (50, 35)))
    tokens = dict(key_mask=key_mask, query_mask=query_mask)
    block_mask, planned = marks(mask, **tokens), fa.plan(mask, key_mask, query_mask).block_mask.cpu()
    seen = (mask & key_mask[:, None, None, :] & query_mask[:, None, :, None]).cpu()
    want = by_hand(seen, grain)
    # Hidden rows do not stop a block from counting as fully visible.
    others = by_hand((mask & key_mask[:, None, None, :] | ~query_mask[:, None, :, None]).cpu(), grain)
    assert torch.equal(block_mask > 0, want > 0)
    assert torch.equal(block_mask[want > 0] == ALL, others[want > 0] == ALL)
    assert (planned[want > 0] > 0).all() and (others[planned == ALL] == ALL).all()
    assert fa.plan(mask, key_mask, query_mask).density == pytest.approx(seen.double().mean().item())
    for few, tokens in ((mask[..., :1], dict(key_mask=key_mask)), (mask[..., :1, :], dict(query_mask=query_mask))):
        tokens = {name: torch.ones_like(x) for name, x in tokens.items()}
        assert fa.plan(few, **tokens).density == pytest.approx(few.double().mean().item())
    assert fa.plan(key_mask=key_mask).block_mask.shape == (1, 1, 1, -(-70 // grain))
    assert fa.plan(query_mask=query_mask[0]).block_mask.shape == (1, 1, -(-50 // grain), 1)


@pytest.mark.parametrize(("kind", "options"), [("plan", {}), ("mask", dict(causal=True)), ("bias", {})], ids=str)
def test_what_is_hidden_is_not_computed(kind, options, device):
    """Kernels skip hidden blocks: NaN in their keys and values changes nothing. Callers must not rely on this."""
    if device == "cuda" and kind != "plan":
        pytest.skip("the tiles of a GPU are tried with a plan alone")
    rows, keys, seen = (40, 96, 64) if device == "cpu" else (1024, 1024, 640)  # a GPU has larger tiles
    tensors, _ = Case("skipped", Hkv=1, Sq=rows, Sk=keys, D=64, Dv=64, dtype=torch.float16).draw(device)
    mask = (torch.arange(keys, device=device) < seen).expand(1, 1, rows, keys).contiguous()
    bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, float("-inf"))
    given = dict(mask=dict(mask=mask), plan=dict(mask=fa.plan(mask)), bias=dict(bias=bias))[kind]
    want = with_gradients(fa.attention, tensors, options | given, backend="triton")
    tensors["key"][:, :, seen:] = tensors["value"][:, :, seen:] = float("nan")
    got = with_gradients(fa.attention, tensors, options | given, backend="triton")
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert all((got[name][:, :, seen:] == 0).all() for name in ("key", "value"))


@pytest.mark.parametrize("name", one_in(4, product(["all", "mask", "key_mask", "query_mask"])))
def test_a_plan_gives_the_same_bits(name, device, monkeypatch):
    case = Case("plan", B=2, Hq=2, Hkv=1, Sq=40, Sk=50, causal=True, mask="heads", key_mask="own", query_mask="own")
    tensors, options = case.draw(device)
    masks = {key: options.pop(key) for key in ("mask", "key_mask", "query_mask")}
    masks = masks if name == "all" else {name: masks[name]}
    if "key_mask" not in masks or "query_mask" not in masks:
        tensors = {key: x.nan_to_num(0.5, 0.5, 0.5) for key, x in tensors.items()}
    plan = fa.plan(**masks)
    monkeypatch.setattr(torch, "tensor", None)  # it copies from the CPU, which a CUDA graph cannot capture
    for backend in ("naive", "triton"):
        want = with_gradients(fa.attention, tensors, options | masks, backend=backend)
        got = with_gradients(fa.attention, tensors, options | dict(mask=plan), backend=backend)
        assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("shape", one_in(3, product(["heads", "batch", "rank 2"])))
def test_a_bias_gradient_leaves_out_no_block_that_another_plane_sees(shape, device, grain):
    tensors, options = Case("bias", B=2, Hq=3, Hkv=3, Sq=40, Sk=70, bias=shape).draw(device)
    options["bias"] = options["bias"].nan_to_num(0.0, 0.0, 0.0)
    options["mask"] = blocky(2, 3, 40, 70, device=device, grain=grain)
    assert_computes(fa.attention, tensors, options, backend="triton")


def test_a_plan_is_looked_at_once(device, launched):
    marked = lambda: [name for name, _ in launched].count("block_mask")  # noqa: E731
    query = torch.randn(1, 1, 20, 16, device=device, requires_grad=True)
    plan = fa.plan(mask := torch.ones(20, 20, dtype=torch.bool, device=device).tril())
    for _ in range(3):
        fa.attention(query, query, query, mask=plan, backend="triton").sum().backward()
    assert marked() == 0
    fa.attention(query, query, query, mask=mask, backend="triton").sum().backward()
    assert marked() == 1  # the backward uses the forward's block mask


def test_a_plan_in_modules_compiled_code_exports_and_torch_func(device):
    layer = fa.MultiHeadAttention(16, 2, device=device, backend="triton")
    x, mask = torch.randn(2, 20, 16, device=device), torch.rand(2, 20, 20, device=device) < 0.5
    assert torch.equal(layer(x, mask=fa.plan(mask))[0], layer(x, mask=mask)[0])
    inside = torch.compile(lambda x, mask: layer(x, mask=fa.plan(mask))[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(inside(x, mask), layer(x, mask=mask)[0])

    class Planned(torch.nn.Module):
        forward = staticmethod(lambda mask: fa.plan(mask, key_mask=mask[:, 0]).mask_bits)

    masks, dims = [torch.rand(n, 9, 9) < 0.5 for n in (2, 14)], {0: torch.export.Dim("batch", min=2, max=99)}
    exported = torch.export.export(Planned(), (masks[0],), dynamic_shapes=dict(mask=dims)).module()
    assert [len(exported(x)) for x in masks] == [16, 32]
    many, square = torch.randn(3, 2, 4, 20, 16, device=device), fa.plan(mask[0])
    got = torch.vmap(lambda q: fa.attention(q, q, q, mask=square, backend="triton"))(many)
    assert_like(got, lambda: torch.stack([fa.reference.eager(q, q, q, mask=mask[0]) for q in many]))
