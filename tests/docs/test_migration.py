"""Tests that the migration pages name each argument of other libraries."""

import inspect
import re

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from fusedattn.compat import flash_attn as flash

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
