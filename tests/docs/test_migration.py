"""Tests that the migration pages name each argument of other libraries, and that two replacements are right."""

import inspect
import re

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import fusedattn as fa
from fusedattn.compat import flash_attn as flash

from ..close import assert_like
from .test_pages import FOLDER

THEIRS = {
    "multihead.md": (torch.nn.MultiheadAttention, torch.nn.MultiheadAttention.forward),
    "flash_attn.md": (flash.flash_attn_func, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache),
    "flex_attention.md": (flex.flex_attention, flex.create_block_mask),
}


@pytest.mark.parametrize("page", THEIRS)
def test_every_argument_has_an_answer(page):
    text = (FOLDER / "migrate" / page).read_text()
    names = {name for function in THEIRS[page] for name in inspect.signature(function).parameters if name != "self"}
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def test_float_padding_of_the_module():
    theirs, ours = torch.nn.MultiheadAttention(16, 2, batch_first=True), fa.MultiHeadAttention(16, 2)
    for part, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True):
        part.load_state_dict(dict(weight=weight, bias=torch.zeros(16)))
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x, padding = torch.randn(3, 5, 16), torch.randn(3, 5)
    hides = padding > 1
    assert_like(ours(x, bias=padding[:, None, None])[0], lambda: theirs(x, x, x, key_padding_mask=padding)[0])
    assert_like(ours(x, key_mask=~hides)[0], lambda: theirs(x, x, x, key_padding_mask=hides)[0])
