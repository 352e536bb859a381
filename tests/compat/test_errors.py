"""Tests that drop-ins raise with the argument names of torch and flash-attn, and in classes that callers catch."""

import functools
import math
import pickle
import re

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import flash_attn as flash, torch as for_torch

from ..mistakes import ints
from ..sequences import offsets

NOT_FLASH = re.compile(r"(?<!new )\b(query|key|value|key_cache|value_cache|new_key|new_value|scale|window)\b")


def assert_refused(error, name, call):
    """Assert that a call's error names the argument in one line, and has a class that callers of the original catch."""
    with pytest.raises(error, match=f"^{name}: expected .* got ") as raised:
        call()
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, RuntimeError) and isinstance(raised.value, AssertionError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is raised.type and str(again) == str(raised.value)
    return str(raised.value)


Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
QT, KT, CU = torch.zeros(10, 4, 8), torch.zeros(14, 2, 8), offsets([3, 7])
LENGTHS = dict(cu_seqlens_q=CU, cu_seqlens_k=offsets([7, 7]), max_seqlen_q=7, max_seqlen_k=7)
POOL = torch.zeros(4, 4, 2, 8)
SDPA_QUERY, SDPA_KEY, MODULE_KEY = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 5, 8)
LAYER = for_torch.MultiheadAttention(8, 2, batch_first=True)
CALLS = {
    "flash_attn_func": dict(q=Q, k=K, v=K),
    "flash_attn_kvpacked_func": dict(q=Q, kv=torch.stack([K, K], 2)),
    "flash_attn_qkvpacked_func": dict(qkv=torch.stack([Q, Q, Q], 2)),
    "flash_attn_varlen_func": dict(q=QT, k=KT, v=KT, **LENGTHS),
    "flash_attn_varlen_kvpacked_func": dict(q=QT, kv=torch.stack([KT, KT], 1), **LENGTHS),
    "flash_attn_varlen_qkvpacked_func": dict(qkv=torch.stack([QT, QT, QT], 1), cu_seqlens=CU, max_seqlen=7),
    "pages": dict(q=torch.zeros(5, 4, 8), k=POOL, v=POOL, cu_seqlens_q=offsets([2, 3]), cu_seqlens_k=offsets([3, 4]))
    | dict(max_seqlen_q=3, max_seqlen_k=4, block_table=ints([0], [1])),
    "sdpa": dict(query=SDPA_QUERY, key=SDPA_KEY, value=SDPA_KEY),
    "MultiheadAttention": dict(embed_dim=8, num_heads=2),
    "layer": dict(query=torch.randn(2, 3, 8), key=MODULE_KEY, value=MODULE_KEY)
    | dict(key_padding_mask=torch.zeros(2, 5).bool(), attn_mask=torch.zeros(4, 3, 5)),
}
OTHERS = dict(pages=flash.flash_attn_varlen_func, sdpa=for_torch.scaled_dot_product_attention, layer=LAYER)
OTHERS["MultiheadAttention"] = for_torch.MultiheadAttention
DENSE = (TypeError, "q", None), (TypeError, "k", K.half()), (ValueError, "v", K[:, :6])
DENSE = *DENSE, (ValueError, "alibi_slopes", torch.zeros(3))
PACKED = [
    (ValueError, "q", Q), (ValueError, "k", KT[..., :4]), (ValueError, "v", KT[:6]),
    (TypeError, "cu_seqlens_q", CU.long()), (ValueError, "cu_seqlens_q", offsets([3, 6])),
    (ValueError, "max_seqlen_q", 6), (TypeError, "max_seqlen_k", 7.0), (ValueError, "softmax_scale", math.nan),
]  # fmt: skip
WRONG = [
    *(("flash_attn_func", *each) for each in DENSE),
    *(("flash_attn_varlen_func", *each) for each in PACKED),
    ("flash_attn_kvpacked_func", ValueError, "kv", K),
    ("flash_attn_kvpacked_func", ValueError, "kv", torch.zeros(2, 7, 3, 2, 8)),
    ("flash_attn_kvpacked_func", ValueError, "kv", torch.zeros(2, 7, 2, 3, 8)),
    ("flash_attn_kvpacked_func", ValueError, "softmax_scale", math.inf),
    ("flash_attn_qkvpacked_func", ValueError, "qkv", torch.zeros(2, 5, 2, 4, 8)),
    ("flash_attn_qkvpacked_func", TypeError, "qkv", torch.zeros(2, 5, 3, 4, 8).int()),
    ("flash_attn_varlen_kvpacked_func", ValueError, "kv", torch.zeros(14, 2, 3, 8)),
    ("flash_attn_varlen_kvpacked_func", ValueError, "cu_seqlens_k", offsets([7, 6])),
    ("flash_attn_varlen_qkvpacked_func", ValueError, "qkv", torch.zeros(10, 2, 4, 8)),
    ("flash_attn_varlen_qkvpacked_func", ValueError, "cu_seqlens", offsets([3, 6])),
    ("flash_attn_varlen_qkvpacked_func", ValueError, "max_seqlen", 6),
    ("pages", ValueError, "block_table", ints([0], [9])), ("pages", ValueError, "block_table", ints([0])),
    ("pages", TypeError, "block_table", torch.tensor([[0], [1]])),
    ("pages", ValueError, "cu_seqlens_k", offsets([2, 5])), ("pages", ValueError, "cu_seqlens_k", offsets([3, -1])),
    ("pages", ValueError, "k", POOL[0]), ("pages", ValueError, "v", POOL[:, :3]),
    ("sdpa", TypeError, "key", torch.nested.nested_tensor([torch.randn(3, 8)])),
    ("sdpa", ValueError, "query", torch.randn(8)),
    ("sdpa", ValueError, "key", torch.randn(3, 4, 5, 8)),  # another batch size
    ("sdpa", ValueError, "key", SDPA_KEY[:, :2], dict(value=SDPA_KEY[:, :2])),  # fewer heads
    ("sdpa", ValueError, "key", SDPA_KEY[:, :3], dict(value=SDPA_KEY[:, :3], enable_gqa=True)),
    ("sdpa", ValueError, "query", SDPA_QUERY[0, 0], dict(enable_gqa=True)),
    ("sdpa", ValueError, "value", torch.randn(2, 4, 6, 8)),  # longer than key
    ("sdpa", ValueError, "key", torch.randn(2, 4, 5, 6)), ("sdpa", TypeError, "value", SDPA_KEY.double()),
    ("sdpa", ValueError, "is_causal", True, dict(attn_mask=torch.ones(3, 5).bool())),
    ("sdpa", ValueError, "attn_mask", torch.zeros(1, 2, 4, 3, 5)),
    ("sdpa", TypeError, "attn_mask", torch.zeros(3, 5).double()),
    ("MultiheadAttention", ValueError, "num_heads", 3),
    ("layer", ValueError, "key_padding_mask", torch.zeros(2, 3).bool()),
    ("layer", TypeError, "key_padding_mask", torch.zeros(2, 5).byte()),
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row[0]}, {row[2]}")
def test_errors_name_the_arguments_of_the_original(row):
    name, error, argument, wrong, *more = row
    function = OTHERS.get(name) or getattr(flash, name)
    function(**CALLS[name])
    changed = {argument: wrong} | (more[0] if more else {})
    text = assert_refused(error, argument, functools.partial(function, **CALLS[name] | changed))
    assert name in ("sdpa", "MultiheadAttention", "layer") or not NOT_FLASH.search(text)
    dtypes = re.findall(r"torch\.\w+", text.partition(", got ")[0])
    assert len(dtypes) == len({*dtypes})


def test_errors_show_the_shapes_that_the_caller_has():
    for call, shape in (
        (lambda: flash.flash_attn_func(Q, K, K[:, :6]), "(2, 6, 2, 8)"),
        (lambda: flash.flash_attn_varlen_func(**CALLS["flash_attn_varlen_func"] | dict(q=Q)), "(2, 5, 4, 8)"),
        (lambda: flash.flash_attn_with_kvcache(Q[:1], K, K[:, :6]), "(2, 6, 2, 8)"),  # the call uses one of two caches
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value).endswith(f"got shape {shape}")


def test_a_kernel_that_cannot_says_so_in_flash_attns_words(device):
    q = torch.zeros(1, 2, 1, 600, device=device)
    with fa.use_backend("triton"), pytest.raises(NotImplementedError) as raised:
        flash.flash_attn_func(q, q, q)
    assert "the head dimension of q is 600" in str(raised.value) and not NOT_FLASH.search(str(raised.value))


def test_a_compiled_program_catches_them_too():
    def attend(query, key):
        try:
            return for_torch.scaled_dot_product_attention(query, key, key)
        except RuntimeError:
            return query

    x = torch.zeros(2, 2, 4, 8)
    assert torch.equal(torch.compile(attend, backend="eager")(x, x[..., :4]), x)
