"""The pages about other libraries name every argument of theirs, and what replaces it does the same."""

import inspect
import re

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


def test_xformers():
    assert set(XFORMERS) <= named_on("xformers.md")


def _seen(rows, keys, **options):
    query, key = torch.zeros(rows, 1), torch.zeros(keys, 1)
    return fa.attention(query, key, key, **options, return_weights=True, backend="naive")[1] > 0
