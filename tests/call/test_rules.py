"""Every wrong argument raises, in one line that names it, and its nearest right neighbour works."""

import contextlib

import pytest
import torch

import fusedattn as fa
from fusedattn.call import rules as checks

B, Hq, Hkv, Sq, Sk, D, Dv = 2, 4, 2, 3, 5, 8, 6


def tensors(**changed):
    good = dict(query=torch.randn(B, Hq, Sq, D), key=torch.randn(B, Hkv, Sk, D), value=torch.randn(B, Hkv, Sk, Dv))
    return {**good, **changed}


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


FLOAT8 = torch.float8_e5m2
# argument it must name, error, what the sentence must say, what is changed, a neighbour that is right
WRONG = [
    ("query", TypeError, "a tensor, got list", dict(query=[1.0]), {}),
    ("key", TypeError, "a tensor, got NoneType", dict(key=None), {}),
    ("value", TypeError, "a tensor, got float", dict(value=1.0), {}),
    ("query", TypeError, "a floating dtype, got torch.int64", dict(query=torch.ones(B, Hq, Sq, D).long()), {}),
    ("query", TypeError, "float8_e5m2, which is none of float16", dict(query=torch.ones(B, Hq, Sq, D).to(FLOAT8)), {}),
    ("bias", TypeError, "float8_e5m2, which is none of", dict(bias=torch.ones(Sq, Sk).to(FLOAT8)), {}),
    ("query", TypeError, "a strided tensor", dict(query=torch.ones(3, 4).to_sparse()), {}),
    ("key", TypeError, "a strided tensor", dict(key=torch.ones(3, 4).to_sparse()), {}),
    ("value", TypeError, "a strided tensor", dict(value=torch.ones(3, 4).to_sparse()), {}),
    ("mask", TypeError, "a strided tensor", dict(mask=bools(Sq, Sk).to_sparse()), {}),
    ("key_mask", TypeError, "a strided tensor", dict(key_mask=bools(B, Sk).to_sparse()), {}),
    ("query_mask", TypeError, "a strided tensor", dict(query_mask=bools(B, Sq).to_sparse()), {}),
    ("scale", ValueError, "a finite number", dict(scale=10**400), dict(scale=3e38)),
    ("scale", ValueError, "a number that float32 can hold", dict(scale=1e39), dict(scale=-3e38)),
    ("backend", ValueError, "got ['naive']", dict(backend=["naive"]), {}),
    ("key", TypeError, "torch.float32, got torch.float16", dict(key=torch.ones(B, Hkv, Sk, D).half()), {}),
    ("value", TypeError, "torch.float32, got torch.float64", dict(value=torch.ones(B, Hkv, Sk, Dv).double()), {}),
    ("key", ValueError, "the device of query, cpu, got meta", dict(key=torch.ones(B, Hkv, Sk, D, device="meta")), {}),
    ("value", ValueError, "device of query, cpu", dict(value=torch.ones(B, Hkv, Sk, Dv, device="meta")), {}),
    ("query", ValueError, "rank 2, 3 or 4, got (8,)", dict(query=torch.ones(8)), {}),
    ("query", ValueError, "rank 2, 3 or 4", dict(query=torch.ones(1, B, Hq, Sq, D)), {}),
    ("key", ValueError, "the rank of query, 4", dict(key=torch.ones(B, Sk, D)), {}),
    ("value", ValueError, "the rank of query, 4", dict(value=torch.ones(Sk, Dv)), {}),
    ("query", ValueError, "1 or more", dict(query=torch.ones(B, Hq, Sq, 0), key=torch.ones(B, Hkv, Sk, 0)), {}),
    ("value", ValueError, "1 or more", dict(value=torch.ones(B, Hkv, Sk, 0)), dict(value=torch.ones(B, Hkv, Sk, 1))),
    ("key", ValueError, "the head dimension of query, 8", dict(key=torch.ones(B, Hkv, Sk, 9)), {}),
    (
        "key",
        ValueError,
        "the batch size of query, 2",
        dict(key=torch.ones(1, Hkv, Sk, D), value=torch.ones(1, Hkv, Sk, Dv)),
        {},
    ),
    ("value", ValueError, "as in key, (2, 2, 5, 8)", dict(value=torch.ones(B, Hkv, Sk + 1, Dv)), {}),
    ("value", ValueError, "as in key", dict(value=torch.ones(B, 1, Sk, Dv)), {}),
    (
        "key",
        ValueError,
        "divides the 4 of query, got 3 heads",
        dict(key=torch.ones(B, 3, Sk, D), value=torch.ones(B, 3, Sk, Dv)),
        dict(key=torch.ones(B, 1, Sk, D), value=torch.ones(B, 1, Sk, Dv)),
    ),
    ("key", ValueError, "got 0 heads", dict(key=torch.ones(B, 0, Sk, D), value=torch.ones(B, 0, Sk, Dv)), {}),
    ("mask", TypeError, "True = may attend (added to scores, it is a bias)", dict(mask=torch.ones(Sq, Sk)), {}),
    ("mask", TypeError, "a bool tensor, True = may attend (say .bool())", dict(mask=torch.ones(Sq, Sk).int()), {}),
    ("mask", TypeError, "got torch.float32", dict(mask=torch.zeros(Sq, Sk)), dict(mask=bools(Sq, Sk))),
    ("mask", TypeError, "got list", dict(mask=[[True]]), {}),
    ("mask", ValueError, "rank 2 or that of query, 4", dict(mask=bools(B, Sq, Sk)), dict(mask=bools(B, 1, Sq, Sk))),
    ("mask", ValueError, "rank 2 or that of query, 4", dict(mask=bools(Sk)), dict(mask=bools(1, Sk))),
    ("mask", ValueError, "broadcastable to (2, 4, 3, 5)", dict(mask=bools(Sq, Sk + 1)), dict(mask=bools(1, 1))),
    ("mask", ValueError, "broadcastable to", dict(mask=bools(B, Hkv, Sq, Sk)), dict(mask=bools(B, Hq, 1, Sk))),
    ("mask", ValueError, "the device of query, cpu, got meta", dict(mask=bools(Sq, Sk).to("meta")), {}),
    ("mask", ValueError, "5) (one of keys is passed as key_mask), got", dict(mask=bools(B, Sk)), {}),
    ("mask", ValueError, "5) (one of queries is passed as query_mask), got", dict(mask=bools(B, Sq)), {}),
    ("mask", ValueError, "query, 4 (one of keys is passed as key_mask), got", dict(mask=bools(Sk)), {}),
    ("key_mask", TypeError, "a bool tensor", dict(key_mask=torch.ones(B, Sk)), dict(key_mask=bools(B, Sk))),
    ("key_mask", ValueError, "shape (2, 5), (1, 5) or (5,)", dict(key_mask=bools(B, Sq)), dict(key_mask=bools(1, Sk))),
    ("key_mask", ValueError, "shape (2, 5)", dict(key_mask=bools(B, 1)), dict(key_mask=bools(Sk))),
    ("key_mask", ValueError, "shape (2, 5)", dict(key_mask=bools(B, 1, Sk)), {}),
    ("key_mask", ValueError, "device", dict(key_mask=bools(B, Sk).to("meta")), {}),
    ("query_mask", TypeError, "a bool tensor", dict(query_mask=torch.ones(B, Sq).int()), {}),
    ("query_mask", ValueError, "shape (2, 3)", dict(query_mask=bools(B, Sk)), dict(query_mask=bools(B, Sq))),
    ("query_mask", ValueError, "shape (2, 3)", dict(query_mask=bools(3, Sq)), dict(query_mask=bools(Sq))),
    ("query_mask", ValueError, "device", dict(query_mask=bools(B, Sq).to("meta")), {}),
    ("causal", TypeError, "a bool, got 1", dict(causal=1), dict(causal=True)),
    ("window", TypeError, "(left, right), each an int or None, got 3", dict(window=3), dict(window=(3, None))),
    ("window", TypeError, "(left, right)", dict(window=(1, 2, 3)), dict(window=[1, 2])),
    ("window", TypeError, "(left, right)", dict(window=(1.5, 2)), {}),
    ("window", TypeError, "(left, right)", dict(window=(True, 2)), {}),
    ("window", ValueError, "no negative side", dict(window=(-1, 0)), dict(window=(0, 0))),
    ("window", ValueError, "no negative side", dict(window=(None, -1)), dict(window=(None, 2**40))),
    ("align", ValueError, "'bottom_right' or 'top_left', got 'left'", dict(align="left"), dict(align="top_left")),
    ("align", ValueError, "got None", dict(align=None), {}),
    ("scale", TypeError, "a number, got str", dict(scale="1"), dict(scale=1)),
    ("scale", TypeError, "a number, got bool", dict(scale=True), dict(scale=0)),
    ("scale", TypeError, "a number, got Tensor", dict(scale=torch.ones(1)), {}),
    ("scale", ValueError, "a finite number, got nan", dict(scale=float("nan")), dict(scale=-1e30)),
    ("scale", ValueError, "a finite number, got inf", dict(scale=float("inf")), {}),
    ("scale", ValueError, "a finite number, got -inf", dict(scale=float("-inf")), {}),
    ("bias", TypeError, "a floating tensor, got torch.bool", dict(bias=bools(Sq, Sk)), dict(bias=torch.ones(Sq, Sk))),
    ("bias", TypeError, "a floating tensor, got float", dict(bias=1.0), dict(bias=torch.ones(1, 1).double())),
    ("bias", ValueError, "rank 2 or that of query", dict(bias=torch.ones(B, Sq, Sk)), {}),
    ("bias", ValueError, "broadcastable", dict(bias=torch.ones(Sq, Sq)), dict(bias=torch.ones(B, Hq, 1, Sk).half())),
    ("bias", ValueError, "the device of query", dict(bias=torch.ones(Sq, Sk, device="meta")), {}),
    ("bias", TypeError, "a strided tensor", dict(bias=torch.ones(Sq, Sk).to_sparse()), {}),
    ("alibi_slopes", TypeError, "a strided tensor", dict(alibi_slopes=torch.ones(Hq).to_sparse()), {}),
    ("sinks", TypeError, "a strided tensor", dict(sinks=torch.ones(Hq).to_sparse()), {}),
    ("softcap", TypeError, "a number, got str", dict(softcap="50"), dict(softcap=50)),
    ("softcap", ValueError, "above 0, got 0", dict(softcap=0), dict(softcap=1e-3)),
    ("softcap", ValueError, "above 0, got nan", dict(softcap=float("nan")), {}),
    ("alibi_slopes", TypeError, "a floating tensor", dict(alibi_slopes=[0.5] * Hq), {}),
    (
        "alibi_slopes",
        ValueError,
        "(4,) or (2, 4)",
        dict(alibi_slopes=torch.ones(Hkv)),
        dict(alibi_slopes=torch.ones(Hq)),
    ),
    ("alibi_slopes", ValueError, "(2, 4)", dict(alibi_slopes=torch.ones(3, Hq)), dict(alibi_slopes=torch.ones(B, Hq))),
    ("alibi_slopes", ValueError, "the device", dict(alibi_slopes=torch.ones(Hq, device="meta")), {}),
    ("sinks", TypeError, "a floating tensor, got torch.int64", dict(sinks=torch.ones(Hq).long()), {}),
    ("sinks", ValueError, "shape (4,)", dict(sinks=torch.ones(B, Hq)), dict(sinks=torch.ones(Hq).bfloat16())),
    ("sinks", ValueError, "shape (4,)", dict(sinks=torch.ones(1, Hq)), {}),
    ("sinks", ValueError, "the device", dict(sinks=torch.ones(Hq, device="meta")), {}),
    ("dropout_p", TypeError, "a number, got bool", dict(dropout_p=True), dict(dropout_p=1)),
    ("softcap", ValueError, "float32 can hold", dict(softcap=1e39), dict(softcap=1e38)),
    ("dropout_p", ValueError, "from 0 to 1, got 1.5", dict(dropout_p=1.5), dict(dropout_p=0.5)),
    ("dropout_p", ValueError, "from 0 to 1, got -0.1", dict(dropout_p=-0.1), dict(dropout_p=0)),
    ("dropout_p", ValueError, "from 0 to 1, got nan", dict(dropout_p=float("nan")), {}),
    ("seed", TypeError, "an int or a tensor of one int64, got float", dict(seed=1.0), dict(seed=2**63 - 1)),
    ("seed", TypeError, "got torch.int32", dict(seed=torch.ones(1).int()), dict(seed=torch.tensor(7))),
    ("seed", ValueError, "one element on", dict(seed=torch.ones(2).long()), dict(seed=torch.tensor([7]))),
    ("seed", ValueError, "64 bits", dict(seed=2**63), dict(seed=-1)),
    (
        "backend",
        ValueError,
        "None or one of 'hopper', 'triton', 'cpu', 'naive', got 'cuda'",
        dict(backend="cuda"),
        dict(backend="naive"),
    ),
]


def rows():
    return [tensors(**changed) for _, _, _, changed, _ in WRONG]


def unreached(monkeypatch, module, tables, attend, calls):
    """The rules of some tables, which `apply` of a module goes through, that none of some calls breaks."""
    broken = set()

    def apply(table, arguments, about):
        for rule in table:
            if rule.wrong(getattr(arguments, rule.argument), about):
                broken.add(id(rule))
                raise ValueError("broken")

    monkeypatch.setattr(module, "apply", apply)
    for arguments in calls:
        with contextlib.suppress(ValueError, TypeError):
            attend(**arguments)
    return [(rule.argument, rule.expected) for table in tables for rule in table if id(rule) not in broken]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row[0]}: {row[2]}")
def test_a_wrong_argument_is_named(row):
    argument, error, text, changed, neighbour = row
    calls = [fa.attention, fa.explain]
    if argument != "backend":
        calls.append(fa.reference.attention)
    for call in calls:
        with pytest.raises(error) as raised:
            call(**tensors(**changed))
        message = str(raised.value)
        assert message.startswith(f"{argument}: expected ") and ", got " in message and "\n" not in message
        assert text in message
        call(**tensors(**neighbour))


def test_a_plan_of_masks_that_do_not_go_together():
    for changed, error, text in (
        ({}, ValueError, "mask: expected a mask, a key_mask or a query_mask, got none of them"),
        (dict(mask=torch.ones(3, 4)), TypeError, "mask: expected a bool tensor"),
        (dict(mask=bools(3)), ValueError, "mask: expected rank 2 to 4"),
        (dict(key_mask=bools(1, 2, 3)), ValueError, "key_mask: expected rank 1 to 2"),
        (dict(mask=bools(3, 4), key_mask=bools(2, 5)), ValueError, "key_mask: expected a shape"),
        (dict(mask=bools(2, 1, 3, 4), query_mask=bools(3, 3)), ValueError, "query_mask: expected a shape"),
        (dict(key_mask=bools(2, 5), query_mask=bools(3, 5)), ValueError, "query_mask: expected a shape"),
        (dict(mask=bools(3, 4), key_mask=bools(4).to("meta")), ValueError, "key_mask: expected the device"),
    ):
        with pytest.raises(error) as raised:
            fa.plan(**changed)
        assert text in str(raised.value)
    fa.plan(bools(2, 1, 3, 4), bools(1, 4), bools(2, 3))
    plan = fa.plan(bools(Sq, Sk), key_mask=bools(Sk))
    fa.attention(**tensors(mask=plan))
    for name in ("key_mask", "query_mask"):
        with pytest.raises(ValueError, match=f"{name}: expected None beside a plan"):
            fa.attention(**tensors(mask=plan, **{name: bools(Sk if name == "key_mask" else Sq)}))
    with pytest.raises(ValueError, match="mask: expected broadcastable"):
        fa.attention(**tensors(mask=fa.plan(bools(Sq, Sk + 1))))


@pytest.mark.parametrize("rank", [2, 3])
def test_masks_of_lower_ranks(rank):
    query, key = torch.randn(B, Sq, D), torch.randn(B, Sk, D)
    if rank == 3:
        fa.attention(query, key, key, mask=bools(B, Sq, Sk)), fa.attention(query, key, key, mask=bools(Sq, Sk))
        with pytest.raises(ValueError, match="mask: expected rank 2 or that of query, 3"):
            fa.attention(query, key, key, mask=bools(B, 1, Sq, Sk))
        with pytest.raises(ValueError, match="mask: expected broadcastable"):
            fa.attention(query, key, key, mask=bools(3, Sq, Sk))
    else:
        fa.attention(query[0], key[0], key[0], mask=bools(Sq, Sk), key_mask=bools(Sk))
        with pytest.raises(ValueError, match="mask: expected rank 2"):
            fa.attention(query[0], key[0], key[0], mask=bools(1, Sq, Sk))
        with pytest.raises(ValueError, match="key_mask"):
            fa.attention(query[0], key[0], key[0], key_mask=bools(2, Sk))


def test_every_rule_has_a_row(monkeypatch):
    """What WRONG does not reach would be a rule that nobody has seen fail."""
    assert unreached(monkeypatch, checks, [checks.TENSORS, *checks.OPTIONS.values()], fa.attention, rows()) == []


def test_a_mask_of_as_many_queries_as_keys_may_be_of_either():
    x = torch.randn(B, Hq, Sk, D)
    with pytest.raises(
        ValueError, match=r"\(one of keys is passed as key_mask, one of queries is passed as query_mask\)"
    ):
        fa.attention(x, x, x, mask=bools(B, Sk))
    with pytest.raises(ValueError, match=r"^bias: expected broadcastable to \(2, 4, 5, 5\), got \(2, 5\)$"):
        fa.attention(x, x, x, bias=torch.zeros(B, Sk))


OFFSETS = torch.tensor([0, Sk], dtype=torch.int32)
PACKED = dict(zip(("query", "key", "value"), torch.randn(3, Sk, Hq, D), strict=True))
PACKED |= dict(cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
CACHED = dict(zip(("query", "key_cache", "value_cache"), torch.randn(3, B, Hq, Sk, D), strict=True))
CACHED |= dict(cache_seqlens=torch.full((B,), Sk, dtype=torch.int32))
THEIRS = dict(zip("qkv", torch.randn(3, B, Sk, Hq, D), strict=True))
CACHE = dict(zip(("q", "k_cache", "v_cache"), torch.randn(3, B, Sk, Hq, D), strict=True))
SEQUENCES = dict(zip(("query", "key", "value"), torch.randn(3, B, Sk, D), strict=True))
LAYERS = [fa.MultiHeadAttention(D, 2), fa.SelfAttention(D), fa.compat.torch.MultiheadAttention(D, 2, batch_first=True)]
LSE_AND_WEIGHTS = ("return_lse", "return_weights")
FLAGS = [
    ("attention", fa.attention, tensors(), LSE_AND_WEIGHTS),
    ("explain", fa.explain, tensors(), LSE_AND_WEIGHTS),
    ("reference", fa.reference.attention, tensors(), LSE_AND_WEIGHTS),
    ("eager", fa.reference.eager, tensors(), LSE_AND_WEIGHTS),
    ("varlen", fa.attention_varlen, PACKED, LSE_AND_WEIGHTS),
    ("reference varlen", fa.reference.attention_varlen, PACKED, LSE_AND_WEIGHTS),
    ("decode", fa.attention_decode, CACHED, (*LSE_AND_WEIGHTS, "rotary_interleaved")),
    ("reference decode", fa.reference.attention_decode, CACHED, (*LSE_AND_WEIGHTS, "rotary_interleaved")),
    ("module", LAYERS[0], SEQUENCES, ("need_weights",)),
    ("self", LAYERS[1], dict(x=SEQUENCES["query"]), ("need_weights",)),
    ("torch's", LAYERS[2], SEQUENCES, ("need_weights", "average_attn_weights", "is_causal")),
    ("module", fa.MultiHeadAttention, dict(embed_dim=D, num_heads=2), ("bias", "causal")),
    ("self", fa.SelfAttention, dict(embed_dim=D), ("bias",)),
    (
        "torch's",
        fa.compat.torch.MultiheadAttention,
        dict(embed_dim=D, num_heads=2),
        ("bias", "add_bias_kv", "add_zero_attn", "batch_first"),
    ),
    ("sdpa", fa.compat.torch.scaled_dot_product_attention, SEQUENCES, ("is_causal", "enable_gqa")),
    ("flash", fa.compat.flash_attn.flash_attn_func, THEIRS, ("causal", "deterministic", "return_attn_probs")),
    ("flash cache", fa.compat.flash_attn.flash_attn_with_kvcache, CACHE, ("causal", "return_softmax_lse")),
]


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: f"{row[0]}: {', '.join(row[3])}")
def test_a_flag_is_true_or_false(row):
    _, function, arguments, flags = row
    function(**arguments)
    for flag in flags:
        for wrong in ("yes", None, torch.ones(2, 2), *(() if "torch's" in row[0] else (1,))):
            with pytest.raises(TypeError, match=f"^{flag}: expected a bool, got [^\n]+$"):
                function(**arguments, **{flag: wrong})


def test_a_flag_is_true_or_false_where_a_call_is_launched_again(device):
    query = torch.randn(1, 2, 4, 8, device=device)
    for _ in range(3):
        fa.attention(query, query, query, return_lse=True, backend="triton")
    with pytest.raises(TypeError, match="return_lse: expected a bool, got int"):
        fa.attention(query, query, query, return_lse=1, backend="triton")


def test_an_unknown_option_is_named():
    for function in (fa.attention, fa.explain, fa.reference.eager):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'causall'$"):
            function(**tensors(), causall=True)


def test_nothing_is_written_before_an_error():
    wrong = tensors(key=torch.randn(B, Hkv, Sk, D + 1))
    before = {name: x.clone() for name, x in wrong.items()}
    with pytest.raises(ValueError):
        fa.attention(**wrong)
    assert all(torch.equal(before[name], wrong[name]) for name in wrong)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_decode"])
@pytest.mark.parametrize("unknown", ["backend", "foo"])
def test_the_reference_names_itself(name, unknown):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{unknown}'"):
        getattr(fa.reference, name)(**{unknown: "naive"})
