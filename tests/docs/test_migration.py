"""The pages about other libraries name every argument of theirs, and what replaces it does the same."""

import inspect
import re

import pytest
import torch

import fusedattn as fa

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
