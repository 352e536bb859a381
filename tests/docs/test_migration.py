"""The pages about other libraries name every argument of theirs, and what replaces it does the same."""

import inspect
import re

import pytest
import torch

import fusedattn as fa

from ..close import assert_like
from .test_pages import FOLDER

XFORMERS = "query key value attn_bias p scale op output_dtype".split()  # of memory_efficient_attention, 0.0.35
SDPA = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()


def named_on(page):
    """The names in the first columns of the tables of a page."""
    cells = re.findall(r"^\| (.*?) (?<!\\)\| ", (FOLDER / "migrate" / page).read_text(), re.M)
    return set(re.findall(r"\w+", " ".join(part for cell in cells for part in re.findall(r"`([^`]+)`", cell))))


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_sdpa():
    doc = torch.nn.functional.scaled_dot_product_attention.__doc__
    theirs = re.findall(r"(\w+)(?:=|,|\))", doc[: doc.index("->")].partition("(")[2])
    assert [x for x in theirs if not x[0].isdigit() and x not in ("None", "False")] == SDPA
    assert set(SDPA) <= named_on("sdpa.md")


def test_the_module():
    module = torch.nn.MultiheadAttention
    assert {*parameters(module.__init__), *parameters(module.forward)} <= named_on("multihead.md")
    text = (FOLDER / "migrate" / "multihead.md").read_text()
    assert all(f"`{name}`" in text for name in parameters(fa.MultiHeadAttention))


def test_flash_attn():
    flash = fa.compat.flash_attn
    for function in (flash.flash_attn_func, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache):
        assert set(parameters(function)) <= named_on("flash_attn.md"), function.__name__
    text = (FOLDER / "migrate" / "flash_attn.md").read_text()
    assert all(f"`{function.__name__}`" in text or f"| {function.__name__} |" in text for function in flash._FUNCTIONS)


def test_flex_attention():
    from torch.nn.attention import flex_attention as flex

    for function in (flex.flex_attention, flex.create_block_mask):
        text = (FOLDER / "migrate" / "flex_attention.md").read_text()
        assert not [name for name in parameters(function) if not re.search(rf"\b{name}\b", text)]
    assert {"score_mod", "block_mask", "and_masks", "or_masks", "noop_mask"} <= named_on("flex_attention.md")


def test_masks_and_scores_of_flex_attention():
    from torch.nn.attention.flex_attention import create_mask

    same = {
        lambda b, h, i, j: i >= j: dict(causal=True, align="top_left"),
        lambda b, h, i, j: i + 3 >= j: dict(causal=True),
        lambda b, h, i, j: (i - j).abs() <= 2: dict(window=(2, 2), align="top_left"),
        lambda b, h, i, j: (i >= j) & (i - j <= 2): dict(causal=True, window=(2, None), align="top_left"),
    }
    for mask_mod, options in same.items():
        assert torch.equal(_seen(5, 8, **options), create_mask(mask_mod, None, None, 5, 8, device="cpu")[0, 0])
    table, distance = torch.randn(2, 12), torch.arange(5)[:, None] - torch.arange(8)
    bias = table[None, :, distance + 7]
    assert bias.shape == (1, 2, 5, 8) and bias[0, 1, 4, 0] == table[1, 11]


def test_float_padding_of_the_module():
    theirs, ours = torch.nn.MultiheadAttention(16, 2, batch_first=True), fa.MultiHeadAttention(16, 2)
    for part, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True):
        part.load_state_dict(dict(weight=weight, bias=torch.zeros(16)))
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x, padding = torch.randn(3, 5, 16), torch.randn(3, 5)
    hides = padding > 1
    assert_like(ours(x, bias=padding[:, None, None])[0], lambda: theirs(x, x, x, key_padding_mask=padding)[0])
    assert_like(ours(x, key_mask=~hides)[0], lambda: theirs(x, x, x, key_padding_mask=hides)[0])


def test_caches_of_flash_attn():
    """A row of the table each: heads behind the slots, caches that are chosen, slots that are hidden."""
    with_cache = fa.compat.flash_attn.flash_attn_with_kvcache
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 4, 16)
    k_cache, v_cache = torch.randn(2, 3, 8, 4, 16)
    own = k_cache.clone(), v_cache.clone()
    chosen, left = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
    lengths = torch.tensor([5, 4], dtype=torch.int32)
    theirs = with_cache(q, k_cache, v_cache, new, new, cache_seqlens=lengths, cache_batch_idx=chosen, causal=True)
    caches = (x.transpose(1, 2) for x in own)
    options = dict(new_key=new.transpose(1, 2), new_value=new.transpose(1, 2), block_table=chosen[:, None], causal=True)
    ours = fa.attention_decode(q.transpose(1, 2), *caches, cache_seqlens=lengths, **options)
    assert torch.equal(ours.transpose(1, 2), theirs)
    assert torch.equal(own[0], k_cache) and torch.equal(own[1], v_cache)

    theirs = with_cache(q, k_cache[:2], v_cache[:2], cache_seqlens=lengths, cache_leftpad=left)
    caches, seen = (x[:2].transpose(1, 2) for x in own), torch.arange(8) >= left[:, None]
    ours = fa.attention_decode(q.transpose(1, 2), *caches, cache_seqlens=lengths, key_mask=seen)
    assert torch.equal(ours.transpose(1, 2), theirs)


def test_xformers():
    assert set(XFORMERS) <= named_on("xformers.md")


def _seen(rows, keys, **options):
    query, key = torch.zeros(rows, 1), torch.zeros(keys, 1)
    return fa.attention(query, key, key, **options, return_weights=True, backend="naive")[1] > 0


@pytest.mark.filterwarnings("ignore")
def test_masks_of_xformers():
    biases = pytest.importorskip("xformers.ops.fmha.attn_bias")
    assert set(XFORMERS) == set(parameters(pytest.importorskip("xformers.ops").memory_efficient_attention))
    known = {
        x
        for x in vars(biases)
        if isinstance(vars(biases)[x], type) and issubclass(vars(biases)[x], biases.AttentionBias)
    }
    assert known - {"AttentionBias"} <= named_on("xformers.md")

    local = biases.LowerTriangularFromBottomRightLocalAttentionMask(_window_size=3)
    both_sides = biases.LocalAttentionFromBottomRightMask(window_left=1, window_right=2)
    dense = {
        biases.LowerTriangularMask(): dict(causal=True, align="top_left"),
        biases.LowerTriangularFromBottomRightMask(): dict(causal=True),
    }
    for rows, keys in ((5, 5), (4, 7), (3, 8)):
        for bias, options in (
            *dense.items(),
            (local, dict(causal=True, window=(2, 0))),
            (both_sides, dict(window=(1, 2))),
        ):
            assert torch.equal(_seen(rows, keys, **options), bias.materialize((rows, keys)) == 0), bias

    blocks = {
        "BlockDiagonalMask": {},
        "BlockDiagonalCausalMask": dict(causal=True, align="top_left"),
        "BlockDiagonalCausalFromBottomRightMask": dict(causal=True),
        "BlockDiagonalCausalLocalAttentionMask": dict(causal=True, align="top_left", window=(1, 0)),
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask": dict(causal=True, window=(1, 0)),
    }
    lengths, more = [3, 2, 4], [4, 5, 4]
    for name, options in blocks.items():
        window = dict(_window_size=2) if "Local" in name else {}
        plain = biases.BlockDiagonalMask.from_seqlens(lengths, more)
        bias = getattr(biases, name)(q_seqinfo=plain.q_seqinfo, k_seqinfo=plain.k_seqinfo, **window)
        query, key = torch.zeros(9, 1, 1), torch.zeros(13, 1, 1)
        starts = plain.q_seqinfo.seqstart, plain.k_seqinfo.seqstart
        _, weights = fa.attention_varlen(query, key, key, *starts, **options, return_weights=True, backend="naive")
        got = torch.zeros(9, 13, dtype=torch.bool)
        for first, length, start, keys in zip((0, 3, 5), lengths, (0, 4, 9), more, strict=True):
            got[first : first + length, start : start + keys] = weights[0, first : first + length, :keys] > 0
        assert torch.equal(got, bias.materialize((9, 13)) == 0), name

    padded = {
        "BlockDiagonalPaddedKeysMask": {},
        "BlockDiagonalCausalWithOffsetPaddedKeysMask": dict(causal=True),
        "BlockDiagonalLocalAttentionPaddedKeysMask": dict(window=(1, 2)),
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask": dict(causal=True, window=(2, 0)),
    }
    for name, options in padded.items():
        make, window = getattr(biases, name), ()
        if "Local" in name:
            window = (3,) if "Causal" in name else (1, 2)
        bias = (make.from_seqlens_local if window else make.from_seqlens)([2, 2], 6, [5, 3], *window)
        cache = torch.zeros(2, 1, 6, 1)
        options = options | dict(cache_seqlens=bias.k_seqinfo.seqlen, return_weights=True, backend="naive")
        _, weights = fa.attention_decode(torch.zeros(2, 1, 2, 1), cache, cache, **options)
        whole = torch.block_diag(*(weights[:, 0] > 0).float())
        assert torch.equal(whole > 0, bias.materialize((4, 12)) == 0), name
