"""Tests that a wrong argument raises an error that names it, before any write, and that valid ones are accepted."""

import math

import pytest
import torch

import fusedattn as fa

from ..mistakes import assert_named, bools, ints, longs, of_shapes, of_types, of_values, ones, wrong
from ..sequences import offsets

B, HQ, HKV, SQ, SK, D, DV, PAGES, PAGE = 2, 4, 2, 3, 5, 8, 6, 5, 4
TQ, TK = 7, 9


def options(batch, rows, keys):
    return dict(mask=bools(rows, keys), bias=ones(batch, HQ, 1, keys), alibi_slopes=ones(batch, HQ), sinks=ones(HQ))


def new(rows):
    return dict(new_key=ones(B, HKV, rows, D), new_value=ones(B, HKV, rows, DV))


def rotary(rows, half=3):
    return dict(rotary_cos=ones(rows, half), rotary_sin=ones(rows, half))


FLOAT8 = torch.float8_e5m2
DENSE = dict(query=ones(B, HQ, SQ, D), key=ones(B, HKV, SK, D), value=ones(B, HKV, SK, DV))
DENSE |= options(B, SQ, SK) | dict(key_mask=bools(B, SK), query_mask=bools(B, SQ))
PACKED = dict(query=ones(TQ, HQ, D), key=ones(TK, HKV, D), value=ones(TK, HKV, DV))
PACKED |= dict(cu_seqlens_q=offsets((3, 0, 4)), cu_seqlens_k=offsets((2, 3, 4)))
PACKED |= options(3, 4, 4) | dict(key_mask=bools(TK), query_mask=bools(TQ))
NEITHER = dict(new_key=None, new_value=None)
CACHED = dict(query=ones(B, HQ, SQ, D), cache_seqlens=ints(3, 6)) | new(2) | rotary(9)
CACHED |= options(B, SQ, 8) | dict(key_mask=bools(B, 8), query_mask=bools(B, SQ))
PAGED = CACHED | dict(block_table=ints((0, 3), (2, 4)))
PAGED |= dict(key_cache=ones(PAGES, HKV, PAGE, D), value_cache=ones(PAGES, HKV, PAGE, DV))
CACHED |= dict(key_cache=ones(B, HKV, 8, D), value_cache=ones(B, HKV, 8, DV))
with torch.inference_mode():
    FROZEN = {name: CACHED[name].clone() for name in ("key_cache", "value_cache")}

PLAN = fa.plan(bools(1, 1))
APART = PLAN._replace(mask_bits=PLAN.mask_bits[:1].expand(9, -1))  # kernels would read past the end

# tests/test_hostile.py has values of all other types
COMMON = of_values(dict(bias=[ones(1, 1).to(FLOAT8)], window=[(1.5, 2), (True, 2)]), TypeError) + of_values(
    dict(window=[(-1, 0), (None, -1)], align=["left"], scale=[math.nan, 1e39], softcap=[0, -1.0, 1e39])
)
NOISE = of_values(dict(seed=[longs(1).to_sparse()]), TypeError)
NOISE += of_values(dict(dropout_p=[1.5, -0.1, math.nan], seed=[2**63, longs(1, 2), longs(1).to("meta")]))
OF_DENSE = COMMON + NOISE + of_types(DENSE) + of_shapes(
    DENSE,
    dict(
        query=[(D,), (1, B, HQ, SQ, D), (HQ, SQ, D)],
        key=[(B, SK, D), (B, HKV, SK, D + 1), (1, HKV, SK, D), (B, 3, SK, D), (B, 0, SK, D)],
        value=[(SK, DV), (B, HKV, SK, 0), (B, HKV, SK + 1, DV), (B, 1, SK, DV), (1, HKV, SK, DV)],
        mask=[(B, SQ, SK), (SK,), (SQ, SK + 1), (B, HKV, SQ, SK), (B, SK)], bias=[(B, SQ, SK), (SQ, SQ), (3, 1, 1, 1)],
        key_mask=[(B, SQ), (B, 1), (B, 1, SK), (3, SK), ()], query_mask=[(B, SK), (3, SQ), (1, B, SQ)],
        alibi_slopes=[(HKV,), (3, HQ), (B, HQ, 1)], sinks=[(B, HQ), (1, HQ), (HKV,)],
    ),
) + [
    wrong("query", TypeError, query=ones(B, HQ, SQ, D).to(FLOAT8)),
    wrong("query", query=ones(B, HQ, SQ, 0), key=ones(B, HKV, SK, 0)),
    wrong("key", TypeError, key=ones(B, HKV, SK, D).half()),
    wrong("key", key=ones(1, HKV, SK, D), value=ones(1, HKV, SK, DV)),
    wrong("key", key=ones(B, 3, SK, D), value=ones(B, 3, SK, DV)),
    wrong("key", key=ones(1, B, HKV, SK, D), value=ones(1, B, HKV, SK, DV)),
    wrong("scale", TypeError, scale=ones(2)),
    wrong("mask", mask=APART, key_mask=None, query_mask=None),
]  # fmt: skip
OF_PACKED = COMMON + NOISE + of_types(PACKED) + of_shapes(
    PACKED,
    dict(
        query=[(1, TQ, HQ, D)], key=[(TK, D), (TK, HKV, D + 1), (TK, 3, D)],
        value=[(1, TK, HKV, DV), (TK, HKV, 0), (TK - 1, HKV, DV), (TK, 1, DV)],
        cu_seqlens_q=[(1, 4), (0,)], cu_seqlens_k=[(1, 4), (0,)], mask=[(5, 4), (3, 4, 4)],
        bias=[(TQ, TK), (2, 1, 4, 4)], key_mask=[(1, TK), (TK - 1,)], query_mask=[(1, TQ), (TK,)],
        alibi_slopes=[(2, HQ)], sinks=[(3, HQ)],
    ),
) + of_values(
    dict(
        cu_seqlens_q=[ints(1, 2, 3, TQ), ints(0, 3, 2, TQ), ints(0, 3, 3, 6), ints(0, 3, 3, 8)],
        cu_seqlens_k=[ints(1, 2, 3, TK), ints(0, 3, 2, TK), ints(0, 3, 3, 6), ints(0, TK)],
        max_seqlen_q=[-1, 2**64, 3], max_seqlen_k=[-1, 2**31, 3],
    )
) + [
    wrong("query", query=ones(TQ, HQ, 0), key=ones(TK, HKV, 0)),
    wrong("key", key=ones(TK, 3, D), value=ones(TK, 3, DV)),
    wrong("key", key=ones(1, TK, HKV, D), value=ones(1, TK, HKV, DV)),
    wrong("cu_seqlens_q", cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)),
    wrong("cu_seqlens_k", query=ones(0, HQ, D), query_mask=None, cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)),
    wrong("mask", max_seqlen_q=8),
]  # fmt: skip
OF_CACHED = COMMON + of_values({name: [x] for name, x in FROZEN.items()}) + of_types(CACHED) + of_shapes(
    CACHED,
    dict(
        query=[(HQ, SQ, D)], key_cache=[(B, 8, D), (B, HKV, 8, D + 1), (B, 3, 8, D)],
        value_cache=[(B, 8, DV), (B, HKV, 9, DV), (B, HKV, 8, 0), (B, 1, 8, DV)], cache_seqlens=[(3,), (1,), (B, 1)],
        new_key=[(B, HQ, 2, D), (1, HKV, 2, D), (B, HKV, 2, D + 1), (HKV, 2, D)],
        new_value=[(B, HKV, 1, DV), (B, HKV, 2, D)], rotary_cos=[(9,), (0, 3), (9, 0), (9, 5)],
        rotary_sin=[(9, 2), (8, 3)], mask=[(SQ, 6)], bias=[(SQ, 6)], key_mask=[(B, 6)], query_mask=[(B, 8)],
        sinks=[(HKV,)],
    ),
) + of_values(
    dict(
        cache_seqlens=[ints(3, -1), ints(9, 1)], new_key=[None], new_value=[None], rotary_cos=[None], rotary_sin=[None],
        key_cache=[ones(B, 1, 8, D).expand(-1, HKV, -1, -1), torch._neg_view(CACHED["key_cache"])],
        value_cache=[ones(1, 2, 8, DV).expand(B, -1, -1, -1), torch._neg_view(CACHED["value_cache"])],
    )
) + [
    wrong("query", query=ones(B, HQ, SQ, 0), key_cache=ones(B, HKV, 8, 0)),
    wrong("key_cache", key_cache=ones(B, 3, 8, D), value_cache=ones(B, 3, 8, DV)),
    wrong("key_cache", key_cache=ones(3, HKV, 8, D), value_cache=ones(3, HKV, 8, DV)),
    wrong("new_key", **new(3)),
    wrong("rotary_cos", **rotary(7)),
    wrong("rotary_cos", **rotary(5), **NEITHER),
    wrong("rotary_cos", **rotary(2), **NEITHER, align="top_left"),
    wrong("query", cache_seqlens=ints(1, 4), query_mask=None, **NEITHER),
    wrong("query", cache_seqlens=ints(1, 4), query_mask=None, **NEITHER, window=(None, 1)),
]  # fmt: skip
OF_PAGED = of_types(dict(block_table=PAGED["block_table"])) + of_values(
    dict(
        block_table=[ints((0, 3)), ints(0, 3), ints((0, 3), (2, 5)), ints((-1, 3), (2, 4)), ints((1, -1), (2, 4))],
        cache_seqlens=[ints(9, 1)],
    )
) + [
    wrong("new_key", **new(3)),
    wrong("bias", bias=ones(SQ, 4)),
    # Two sequences share a page: both append to it, or one overwrites an old key of the other, or of itself.
    wrong("block_table", block_table=ints((0, 3), (3, 0)), cache_seqlens=ints(2, 6)),
    wrong("block_table", block_table=ints((0, 3), (3, 0)), cache_seqlens=ints(2, 4)),
    wrong("block_table", block_table=ints((0, 3), (0, 4)), cache_seqlens=ints(3, 4)),
    wrong("block_table", block_table=ints((1, 1), (2, 4))),
    wrong("block_table", key_cache=ones(0, HKV, PAGE, D), value_cache=ones(0, HKV, PAGE, DV)),
]  # fmt: skip
CALLS = {  # (functions, right arguments, mistakes)
    "attention": ((fa.attention, fa.explain, fa.reference.attention), DENSE, OF_DENSE),
    "varlen": ((fa.attention_varlen, fa.reference.attention_varlen), PACKED, OF_PACKED),
    "decode": ((fa.attention_decode, fa.reference.attention_decode), CACHED, OF_CACHED),
    "pages": ((fa.attention_decode, fa.reference.attention_decode), PAGED, OF_PAGED),
}


@pytest.mark.parametrize(
    "name, argument", [(name, x) for name in CALLS for x in dict.fromkeys(row[0] for row in CALLS[name][2])]
)
def test_a_wrong_argument_is_named_and_nothing_is_written(name, argument):
    functions, arguments, rows = CALLS[name]
    for function in functions:
        for row in rows:
            if row[0] == argument:
                assert_named(function, arguments, row)


TRANSPOSED = DENSE | dict.fromkeys(options(B, SQ, SK)) | dict(key_mask=None, query_mask=None)
TRANSPOSED |= dict(query=ones(B, 9, HQ, D), key=ones(B, 9, HKV, D), value=ones(B, 9, HKV, DV))
ADVICE = [  # (arguments, a mistake, what its error tells the caller to write)
    (TRANSPOSED, wrong("key", key=ones(B, 7, HKV, D), value=ones(B, 7, HKV, DV)), ".transpose(1, 2)"),
    (TRANSPOSED, wrong("mask", mask=bools(9, 9)), ".transpose(1, 2)"),
    (TRANSPOSED, wrong("bias", bias=ones(9, 9)), ".transpose(1, 2)"),
    (TRANSPOSED, wrong("key_mask", key_mask=bools(B, 9)), ".transpose(1, 2)"),
    (DENSE, wrong("mask", mask=bools(B, SQ, SK)), ".unsqueeze(1)"),
    (DENSE, wrong("bias", bias=ones(1, SQ, SK)), ".unsqueeze(1) if all heads share it, or call .unsqueeze(0)"),
    (DENSE, wrong("bias", bias=ones(HQ, SQ, SK)), "call .unsqueeze(0) if all batches share it"),
    (DENSE, wrong("mask", mask=bools(SK)), "key_mask"),
    (DENSE, wrong("mask", TypeError, mask=ones(SQ, SK)), "bias"),
    (DENSE, wrong("bias", TypeError, bias=bools(SQ, SK)), "mask"),
    (DENSE, wrong("bias", TypeError, bias=ints(*[1] * SK)), ".float()"),
    (DENSE, wrong("key_mask", TypeError, key_mask=fa.plan(key_mask=bools(B, SK))), "plan"),
]


@pytest.mark.parametrize("arguments, row, advice", ADVICE)
def test_an_error_says_what_to_write_instead(arguments, row, advice):
    assert_named(fa.attention, arguments, row)
    with pytest.raises(row[1]) as raised:
        fa.attention(**arguments | row[2])
    assert advice in str(raised.value).partition(", got ")[2]


def test_a_softcap_of_0_is_refused_where_denormal_numbers_are_flushed():
    query = ones(1, 1, 2, 8)
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(ValueError, match="^softcap: expected a finite number above 0, got 0.0"):
            fa.attention(query, query, query, softcap=0.0)
    finally:
        torch.set_flush_denormal(False)


RIGHT = {
    "attention": [
        dict(mask=bools(B, 1, SQ, SK), bias=ones(SQ, SK).double(), key_mask=bools(SK), query_mask=bools(1, SQ)),
        dict(mask=bools(1, 1), bias=ones(1, 1, SQ, 1).half(), key_mask=bools(1, SK), query_mask=bools(SQ)),
        dict(alibi_slopes=ones(HQ), sinks=ones(HQ).bfloat16(), window=[1, 2], align="top_left", scale=3e38),
        dict(scale=-3e38, softcap=1e38, window=(None, 2**70), dropout_p=1, seed=-1),
        dict(scale=0, softcap=1e-3, window=(0, 0), dropout_p=0, seed=2**63 - 1, causal=True),
        dict(dropout_p=0.5, seed=longs(7), key=ones(B, 1, SK, D), value=ones(B, 1, SK, 1)),
        dict(seed=torch.tensor(7), return_lse=True, return_weights=True),
    ],
    "varlen": [
        dict(max_seqlen_q=4, max_seqlen_k=4, mask=bools(3, 1, 4, 4)),
        dict(max_seqlen_q=8, mask=bools(8, 4), alibi_slopes=ones(HQ)),
        dict(max_seqlen_q=2**31 - 1, max_seqlen_k=9, mask=None, bias=None, key_mask=None),
        dict(query=ones(0, HQ, D), key=ones(0, HKV, D), value=ones(0, HKV, DV))
        | dict(cu_seqlens_q=ints(0), cu_seqlens_k=ints(0))
        | dict.fromkeys(("mask", "bias", "key_mask", "query_mask", "alibi_slopes")),
    ],
    "decode": [
        NEITHER | dict(cache_seqlens=ints(8, 3)),
        rotary(8),
        rotary(6) | NEITHER,
        rotary(3) | NEITHER | dict(align="top_left"),
        rotary(9, 4),
        dict(cache_seqlens=ints(1, 4), query_mask=None, causal=True) | NEITHER,
        dict(cache_seqlens=ints(1, 4), query_mask=None, window=(None, 0)) | NEITHER,
        NEITHER | dict(key_cache=ones(B, 1, 8, D).expand(-1, HKV, -1, -1), value_cache=FROZEN["value_cache"]),
    ],
    "pages": [
        NEITHER | dict(block_table=ints((1, -1), (2, 4))),
        NEITHER | dict(block_table=ints((0, 3), (3, 0)), cache_seqlens=ints(3, 4)),
        dict(block_table=ints((0, 3), (3, 1)), cache_seqlens=ints(2, 6)),
        NEITHER | dict(key_cache=ones(0, HKV, PAGE, D), value_cache=ones(0, HKV, PAGE, DV), cache_seqlens=ints(0, 0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_right_neighbours_of_mistakes_are_taken(name):
    functions, arguments, _ = CALLS[name]
    for function in functions:
        for changed in ({}, *RIGHT[name]):
            given = arguments | changed
            function(**{key: x.clone() if key.endswith("cache") else x for key, x in given.items()})


@pytest.mark.parametrize("shape", [(B, SQ, SK), (SQ, SK)], ids=["rank 3", "rank 2"])
def test_queries_of_lower_ranks(shape):
    query, key = torch.randn(*shape[:-1], D), torch.randn(*shape[:-2], SK, D)
    given = dict(query=query, key=key, value=key)
    masks = dict(mask=bools(*shape), key_mask=bools(*shape[:-2], SK), query_mask=bools(SQ), sinks=ones(1))
    fa.attention(**given, **masks), fa.attention(**given, mask=bools(SQ, SK))
    shapes = dict(mask=[(1, *shape), (SQ, SK + 1)], key_mask=[(3, SK)], sinks=[(2,)])
    for row in of_shapes(masks, shapes):
        assert_named(fa.attention, given, row)


def test_plans():
    """A call with a plan accepts no other masks, and `plan` checks that its masks fit each other."""
    plan = fa.plan(bools(SQ, SK))
    given = DENSE | dict(key_mask=None, query_mask=None)
    fa.attention(**given | dict(mask=plan))
    fa.plan(bools(2, 1, 3, 4), bools(1, 4), bools(2, 3))
    assert_named(fa.attention, DENSE, wrong("key_mask", mask=plan))
    assert_named(fa.attention, given, wrong("query_mask", mask=plan, query_mask=bools(SQ)))
    assert_named(fa.attention, given, wrong("mask", mask=fa.plan(bools(SQ, SK + 1))))
    assert_named(fa.attention_decode, CACHED, wrong("mask", TypeError, mask=plan))
    for masks in (dict(mask=bools(4, 4), key_mask=bools(4)), dict(query_mask=bools(4))):
        assert_named(fa.attention_varlen, PACKED, wrong("mask", mask=fa.plan(**masks)))
    fa.attention_varlen(**PACKED | dict(mask=fa.plan(bools(4, 4))))
    for row in (
        wrong("mask"),
        wrong("mask", TypeError, mask=ones(3, 4)),
        wrong("mask", TypeError, mask=bools(3, 4).to_sparse()),
        wrong("mask", mask=bools(3)),
        wrong("key_mask", key_mask=bools(1, 2, 3)),
        wrong("key_mask", mask=bools(3, 4), key_mask=bools(2, 5)),
        wrong("query_mask", mask=bools(2, 1, 3, 4), query_mask=bools(3, 3)),
        wrong("query_mask", key_mask=bools(2, 5), query_mask=bools(3, 5)),
        wrong("key_mask", mask=bools(4, 3, 5), key_mask=bools(2, 5)),
        wrong("key_mask", mask=bools(3, 4), key_mask=bools(4).to("meta")),
    ):
        assert_named(fa.plan, {}, row)


def test_an_unknown_option_is_named():
    public = fa.attention, fa.explain, fa.reference.eager
    reference = fa.reference.attention, fa.reference.attention_varlen, fa.reference.attention_decode
    for function, option in [*((x, "causall") for x in public), *((x, "backend") for x in reference)]:
        unexpected = rf"^{function.__name__}\(\) got an unexpected keyword argument '{option}'"
        with pytest.raises(TypeError, match=unexpected):
            function(**(DENSE if function in public else {}), **{option: "naive"})


def test_values_on_a_device_are_not_fetched():
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in PACKED.items()}
    out = fa.attention_varlen(**given, max_seqlen_q=4, max_seqlen_k=4)
    assert out.shape == (TQ, HQ, DV)
