"""Each kind of wrong value in the place of each argument: an error names it in one line, or the result is right."""

import pytest
import torch

import fusedattn as fa

from ..close import assert_like
from ..hostile import SCALARS, taken, with_numpys

B, Hq, Hkv, Sq, Sk, D = 2, 4, 2, 3, 5, 8
NUMBERS = {"0", "-0.0", "-1", "1", "1.5", "tiny", "2**31", "2**63"}
RANK_0 = {"float tensor", "int tensor"}
FLAG, FLOATING, MASK = {"True", "False"}, {"None", "half", "double"}, {"None", "bool"}
SEEDS = {"None", "0", "-1", "1", "2**31", "int tensor", "int64", "a row", "rank + 1"}
# What is right in the place of an option.
RIGHT = dict(
    mask=MASK, bias=FLOATING, key_mask=MASK, query_mask=MASK, causal=FLAG, window={"None", "tuple"}, align=set(),
    scale=NUMBERS | RANK_0 | {"None"}, softcap=NUMBERS - {"0", "-0.0", "-1"} | {"None"},
    alibi_slopes=FLOATING, sinks=FLOATING,
    dropout_p={"0", "-0.0", "1", "tiny"}, seed=SEEDS, return_lse=FLAG, return_weights=FLAG, backend={"None"},
)  # fmt: skip
RIGHT_ONCE = dict(
    key_mask=MASK | {"a row"}, query_mask=MASK | {"a row"},
    block_table={"int32", "twice the columns"}, cache_seqlens={"int32"},
    cu_seqlens_q={"int32"}, cu_seqlens_k={"int32"}, max_seqlen_q={"None"}, max_seqlen_k={"None"},
    rotary_cos={"half", "double"}, rotary_sin={"half", "double"}, rotary_interleaved=FLAG,
)  # fmt: skip


def floats(*shape):
    return torch.randn(shape)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def options(*scores, heads=Hq):
    """Every option of a call with scores (rows, keys), right."""
    masks = dict(mask=bools(*scores), bias=floats(*scores), alibi_slopes=floats(heads), sinks=floats(heads))
    numbers = dict(causal=True, window=(1, 1), align="top_left", scale=1.0, softcap=1.0, dropout_p=0.5)
    flags = dict(return_lse=True, return_weights=True, backend="naive")
    return masks | numbers | flags | dict(seed=torch.tensor([3]))


def dense():
    return dict(query=floats(B, Hq, Sq, D), key=floats(B, Hkv, Sk, D), value=floats(B, Hkv, Sk, D))


def packed():
    tensors = dict(query=floats(6, Hq, D), key=floats(6, Hkv, D), value=floats(6, Hkv, D))
    return tensors | dict(cu_seqlens_q=ints(0, 2, 6), cu_seqlens_k=ints(0, 2, 6))


def cached():
    tensors = dict(query=floats(B, Hq, 1, D), key_cache=floats(B, Hkv, Sk, D), value_cache=floats(B, Hkv, Sk, D))
    tensors |= dict(new_key=floats(B, Hkv, 1, D), new_value=floats(B, Hkv, 1, D), cache_seqlens=ints(2, 3))
    return tensors | dict(rotary_cos=floats(Sk, 2), rotary_sin=floats(Sk, 2))


def paged():
    return cached() | dict(block_table=ints(0, 1).reshape(2, 1))


def parts():
    return dict(out_a=floats(B, Sq, D), lse_a=floats(B, Sq), out_b=floats(B, Sq, D), lse_b=floats(B, Sq))


def masks():
    return dict(mask=bools(B, 1, Sq, Sk), key_mask=bools(B, Sk), query_mask=bools(B, Sq))


def using(backend):
    with fa.use_backend(backend):
        pass


TOKENS = dict(key_mask=bools(B, Sk), query_mask=bools(B, Sq))
DENSE = dense() | options(Sq, Sk) | TOKENS
DECODED = {name: x for name, x in options(1, Sk).items() if name not in ("dropout_p", "seed")}
DECODED |= dict(key_mask=bools(B, Sk), query_mask=bools(B, 1), rotary_interleaved=True)
PACKED = options(4, 4) | dict(key_mask=bools(6), query_mask=bools(6), max_seqlen_q=4, max_seqlen_k=4)
# What does not go together: an error may name either.
TOGETHER = dict(
    query=("key", "key_cache", "cache_seqlens", "cu_seqlens_q"), key=("value",), key_cache=("value_cache",),
    value_cache=("new_value",), cu_seqlens_q=("cu_seqlens_k",), rotary_cos=("rotary_sin",),
    block_table=("cache_seqlens", "key_cache"),
    out_a=("lse_a", "out_b"), mask=("key_mask",), new_key=("new_value",),
)  # fmt: skip
CALLS = [
    ("attention", fa.attention, dense, DENSE, TOKENS),
    ("explain", fa.explain, dense, DENSE, TOKENS),
    ("varlen", fa.attention_varlen, packed, packed() | PACKED, {}),
    ("decode", fa.attention_decode, cached, cached() | DECODED, DECODED),
    ("decode pages", fa.attention_decode, paged, {name: paged()[name] for name in ("key_cache", "block_table")}, {}),
    ("merge", fa.merge, parts, parts(), {}),
    ("plan", fa.plan, masks, masks(), TOKENS | dict(mask=None)),
    ("use_backend", using, dict, dict(backend="naive"), {}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_what_is_taken_is_right(call):
    name, function, arguments, every, shared = call
    for argument, value in every.items():
        right = RIGHT | (RIGHT_ONCE if argument in shared or argument not in RIGHT else {})
        beside = TOGETHER.get(argument, ())
        results = taken(function, arguments, argument, value, beside)
        # Values may have more columns than keys; a mask of one plan fewer rows than another.
        more = {"twice the columns"} if argument == "value" else set()
        more |= {"twice the columns"} if (name, argument) == ("decode", "value_cache") else set()
        more |= {"a row"} if (name, argument) == ("plan", "mask") else set()
        more |= {"None"} if (name, argument) == ("decode pages", "block_table") else set()
        more |= with_numpys(right.get(argument, set()))
        assert results.keys() - {"numpy bool"} <= more, (argument, results.keys())


@pytest.mark.parametrize("backend", [None, "triton"])
def test_what_is_taken_gives_what_the_formula_gives(backend, device):
    """Numbers at the edge of what is right, finite for finite inputs."""
    inputs = {name: x.to(device) for name, x in dense().items()}
    for argument, value in (("scale", 1.0), ("softcap", 1.0), ("dropout_p", 0.0), ("window", None), ("seed", 1)):
        more = dict(dropout_p=0.5) if argument == "seed" else dict(seed=3)

        def attend(more=more, **given):
            return fa.attention(**given | dict(backend=backend), **more)

        for kind, out in taken(attend, lambda: inputs, argument, value, but=("None", "int tensor")).items():
            options = more | {argument: SCALARS[kind]}
            assert out.isfinite().all(), (argument, kind)
            assert_like(out, lambda options=options: fa.reference.eager(**inputs, **options))


def test_nothing_wrong_is_taken_where_a_call_is_like_an_earlier_one():
    """What compares a call with those before it gets what nobody has checked."""
    good = dense(), packed(), cached()
    functions = fa.attention, fa.attention_varlen, fa.attention_decode
    for function, arguments in zip(functions, good, strict=True):
        for _ in range(3):
            function(**arguments)
        for name, value in arguments.items():
            taken(function, lambda arguments=arguments: dict(arguments), name, value, TOGETHER.get(name, ()))


def test_masks_of_nested_tensors():
    query = torch.nested.nested_tensor([floats(n, 2, D) for n in (3, 4)], layout=torch.jagged).transpose(1, 2)
    given = dict(query=query, key=query, value=query)
    for name, value in (
        ("key_mask", bools(2, 4)),
        ("query_mask", bools(2, 4)),
        ("mask", bools(4, 4)),
        ("causal", True),
    ):
        assert taken(fa.attention, lambda: given, name, value).keys() - {"numpy bool"} <= RIGHT[name]
    for name in ("key", "value"):
        assert not taken(fa.attention, lambda: given, name, floats(2, 2, 4, D), ("key", "value"))
