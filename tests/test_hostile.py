"""Each kind of wrong value for each argument of modules, layers, drop-ins, pictures, shards and tuning files."""

import pytest
import torch

import fusedattn as fa
from fusedattn import distributed, layers, plot
from fusedattn.compat import _bert_padding, flash_attn, torch as for_torch

from .call.test_hostile import FLAG, FLOATING, MASK, RANK_0, RIGHT, SEEDS, bools, floats
from .hostile import taken, with_numpys

B, H, S, E, D = 2, 2, 4, 8, 4
SIZE, SHARE, X = {"1"}, {"0", "-0.0", "1", "tiny"}, {"no rows", "twice the rows"}
NUMBERS = RIGHT["scale"] - RANK_0 - {"None"}
TOO_LARGE = ("2**31",)  # a size for which torch finds no memory, and says so
ANYTHING = None


def ones(*shape):
    return torch.ones(shape, dtype=torch.int64)


# Options of modules: (a right value, which others are right).
OPTIONS = dict(
    dropout=(0.1, SHARE), attention_dropout=(0.1, SHARE), bias=(True, FLAG), causal=(True, FLAG),
    window=((1, 1), {"None", "tuple"}), scale=(1.0, RIGHT["scale"] | {"1e39"}), backend=("naive", {"None"}),
    softcap=(1.0, RIGHT["softcap"] | {"1e39"}), layer_norm_eps=(1e-5, NUMBERS - {"-1"} | {"1e39"}),
)  # fmt: skip
SELF = dict(dropout=0, bias=0, scale=0, backend=0)
WIDTHS = dict.fromkeys(("kdim", "vdim", "num_kv_heads", "head_dim", "value_head_dim"), (1, SIZE | {"None"}))
KEY_MASK = (bools(B, S), MASK | {"a row"})
MASKS = dict(mask=(bools(S, S), MASK | {"rank + 1"}), key_mask=KEY_MASK)
FLOAT = (floats(B, S, E), X)
BIAS = (floats(S, S), FLOATING | {"rank + 1"})
WEIGHTS = (True, FLAG)
ENCODER = dict(hidden_size=8, num_attention_heads=2, intermediate_size=16)
LAYERS = [
    # class, its sizes, further options, inputs, further inputs: each with what is right.
    (
        fa.MultiHeadAttention,
        dict(embed_dim=8, num_heads=2),
        {name: OPTIONS[name] for name in (*SELF, "causal", "window", "softcap")} | WIDTHS,
        dict(query=FLOAT),
        MASKS
        | dict(key=(floats(B, S, E), {"None"}), value=(floats(B, S, E), {"None"}))
        | dict(query_mask=KEY_MASK, bias=BIAS, need_weights=WEIGHTS),
    ),
    (
        fa.SelfAttention,
        dict(embed_dim=8),
        {name: OPTIONS[name] for name in SELF},
        dict(x=FLOAT),
        dict(mask=(bools(S, S), MASK | {"rank + 1"}), key_mask=KEY_MASK, need_weights=WEIGHTS),
    ),
    (
        layers.SinusoidalPositionalEncoding,
        dict(embed_dim=8, max_len=5),
        {},
        dict(x=(floats(B, S, E), X | {"half", "double"})),
        {},
    ),
    (
        layers.Embeddings,
        dict(vocab_size=7, hidden_size=8, max_position_embeddings=5),
        {name: OPTIONS[name] for name in ("dropout", "layer_norm_eps")},
        dict(input_ids=(ones(B, S), {"int32", "int64", "no rows", "no columns", "twice the rows"})),
        {},
    ),
    (
        layers.FeedForward,
        dict(hidden_size=8, intermediate_size=16),
        dict(dropout=OPTIONS["dropout"]),
        dict(x=(floats(B, S, E), X | {"a row", "rank + 1"})),
        {},
    ),
    (layers.TransformerEncoderLayer, ENCODER, OPTIONS, dict(x=FLOAT), MASKS),
    (layers.TransformerEncoder, dict(num_hidden_layers=1) | ENCODER, {}, dict(x=FLOAT), MASKS),
    (
        layers.AttentionDecoder,
        dict(vocab_size=7, embed_size=8, hidden_size=8, encoder_size=8),
        {name: OPTIONS[name] for name in ("dropout", "scale", "backend")}
        | dict.fromkeys(("num_attentions", "num_heads"), (1, SIZE)),
        dict(input=(ones(B), {"int32", "int64"}), hidden=(floats(B, E), set()))
        | dict(encoder_outputs=(floats(B, S, E), set())),
        dict(key_mask=KEY_MASK, need_weights=WEIGHTS),
    ),
    (
        for_torch.MultiheadAttention,
        dict(embed_dim=8, num_heads=2),
        dict(kdim=(1, SIZE | {"None"}), vdim=(1, SIZE | {"None"}), dropout=OPTIONS["dropout"])
        | dict(bias=WEIGHTS, add_bias_kv=WEIGHTS, add_zero_attn=WEIGHTS, batch_first=WEIGHTS),
        dict.fromkeys(("query", "key", "value"), (floats(B, S, E), set())),
        dict(attn_mask=(torch.zeros(S, S), FLOATING | {"bool"}), need_weights=WEIGHTS, is_causal=(False, {"False"})),
    ),
]  # fmt: skip
# The size that an error names beside the one that is wrong.
TOGETHER = dict(
    embed_dim=("num_heads",), hidden_size=("num_attention_heads", "num_heads"), query=("key",), key=("value",),
    num_heads=("num_kv_heads",), input=("hidden",), hidden=("encoder_outputs",),
)  # fmt: skip


def hold(function, arguments, values, but=()):
    """Whatever else is put in the place of an argument is refused. values: {argument: (one, kinds that are right)}."""
    for name, (value, right) in values.items():
        right = with_numpys(right)
        results = taken(function, lambda: dict(arguments), name, value, TOGETHER.get(name, ()), but)
        assert results.keys() - {"numpy bool"} <= right, (name, sorted(results.keys() - right))


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: row[0].__name__)
def test_modules_and_layers(row):
    cls, sizes, options, inputs, more = row
    flags = ("0", "1") if cls is for_torch.MultiheadAttention else ()  # which torch takes for flags too
    hold(cls, sizes, {name: (x, SIZE) for name, x in sizes.items()}, but=TOO_LARGE)
    hold(cls, sizes, options, but=(*TOO_LARGE, *flags))
    layer = cls(**sizes, **(dict(batch_first=True) if flags else {}))
    hold(layer, {name: x for name, (x, _) in inputs.items()}, inputs | more, but=flags)


def attended():
    return dict(query=floats(B, H, S, D), key=floats(B, H, S, D), value=floats(B, H, S, D))


def test_torchs_function():
    more = dict(
        attn_mask=(floats(S, S), {"None", "bool", "rank + 1"}),
        dropout_p=(0.1, SHARE),
        is_causal=WEIGHTS,
        enable_gqa=WEIGHTS,
    )
    inputs = {name: (x, set()) for name, x in attended().items()}
    hold(for_torch.scaled_dot_product_attention, attended(), more | dict(scale=(1.0, RIGHT["scale"])))
    for name, (x, _) in inputs.items():
        taken(for_torch.scaled_dot_product_attention, attended, name, x, ("query", "key", "value"))


def test_flash_attns_functions():
    x, cache, lengths = floats(B, S, H, D), floats(B, S, H, D), torch.tensor([1, 2], dtype=torch.int32)
    options = dict(
        dropout_p=(0.1, SHARE), softmax_scale=(1.0, RIGHT["scale"]), causal=WEIGHTS, deterministic=WEIGHTS,
        window_size=((1, 1), {"tuple"}), softcap=(1.0, RIGHT["softcap"] | {"0", "-0.0"}),
        alibi_slopes=(floats(H), FLOATING), return_attn_probs=WEIGHTS,
    )  # fmt: skip
    hold(flash_attn.flash_attn_func, dict(q=x, k=x, v=x), options)
    given = dict(q=floats(B, 1, H, D), k_cache=cache, v_cache=cache.clone(), cache_seqlens=lengths)
    shared = {name: options[name] for name in ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")}
    hold(
        flash_attn.flash_attn_with_kvcache, given, shared | dict(return_softmax_lse=WEIGHTS, rotary_interleaved=WEIGHTS)
    )
    for name, x in given.items():
        taken(flash_attn.flash_attn_with_kvcache, lambda: given, name, x, given)


def test_flash_attns_padding():
    """In the place of a mask there may be any of 0 and 1."""
    x, mask = floats(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    real = {"int32", "int64", "uint8", "bool", "half", "double"}
    masks = dict(attention_mask=(mask, real), unused_mask=(1 - mask, real | {"None"}))
    hold(_bert_padding.unpad_input, dict(hidden_states=x, attention_mask=mask), masks)
    taken(
        _bert_padding.unpad_input,
        lambda: dict(attention_mask=mask),
        "hidden_states",
        x,
        ("attention_mask",),
        but=("quantised",),
    )
    rows, places, *_ = _bert_padding.unpad_input(x, mask)
    given = dict(hidden_states=rows, indices=places, batch=2, seqlen=4)
    for name, value in given.items():
        taken(_bert_padding.pad_input, lambda: given, name, value, ("indices",), but=(*TOO_LARGE, "quantised"))


def test_the_function_that_transformers_calls():
    pytest.importorskip("transformers")
    function = fa.compat.transformers.fusedattn_forward
    for name, value in attended().items():
        taken(function, lambda: dict(module=None) | attended(), name, value, ("query", "key", "value"), but=("lazy",))
    masks = dict(attention_mask=(bools(S, S), {"None", "bool", "half", "double"}), scaling=(1.0, RIGHT["scale"]))
    for name, (value, _) in masks.items():
        taken(function, lambda: dict(module=None) | attended(), name, value, ("mask", "bias", "scale"))


def test_pictures():
    pytest.importorskip("matplotlib")
    more = dict(mask=(bools(3, 4), {"None", "bool", "bool tensor", "a row", "rank + 1"}), label=("x", {"str"}))
    more |= dict(top=(1.0, NUMBERS - {"0", "-0.0", "-1"} | {"None", "1e39"}), figure=(None, {"None"}))
    more |= dict(
        titles=(["a", "b"], {"None", "tuple"}), tokens=("abc", {"None", "numpy"}), key_tokens=("abcd", {"None"})
    )
    hold(plot.attention_map, dict(weights=torch.rand(2, 3, 4)), more, but=("lazy",))
    hold(plot.positional_encoding, dict(pe=floats(3, 4)), dict(figure=more["figure"]))
    real = {"int32", "int64", "uint8", "bool", "half", "double", "float8", "rank + 1"}
    sizes = {"a row", "twice the rows", "twice the columns"}
    hold(plot.attention_map, {}, dict(weights=(torch.rand(2, 3, 4), real | sizes)), but=("2**40 of one", "rank + 1"))
    hold(plot.positional_encoding, {}, dict(pe=(floats(3, 4), real | sizes - {"a row"})), but=("2**40 of one",))


def test_shards():
    balance, group = ("zigzag", {"None"}), (None, {"None"})
    hold(
        distributed.positions, dict(length=3), dict(length=(3, {"0", "1"}), group=group, balance=balance), but=TOO_LARGE
    )
    for function in (distributed.shard, distributed.unshard):
        hold(function, dict(x=floats(2, 3), dim=1), dict(dim=(1, {"0", "-1", "1"}), group=group, balance=balance))
    methods = distributed.ring_attention, distributed.gather_attention, distributed.ulysses_attention
    more = dict(balance=balance, group=group, causal=WEIGHTS, scale=(1.0, RIGHT["scale"]), seed=(1, SEEDS))
    for function in methods:
        lacks = ("balance",) if function is distributed.ulysses_attention else ()
        hold(function, attended(), {name: x for name, x in more.items() if name not in lacks})


def test_how_a_module_is_cut():
    def module(method="ring", group=None, balance=None):
        return fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel(method, group, balance))

    for argument, right in (("method", set()), ("balance", {"None"})):
        results = taken(module, dict, argument, None, ("context_parallel",))
        assert results.keys() <= right


def test_tuning_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken(fa.tuning.load, dict, "file", None, but=("str",))
    with pytest.raises(FileNotFoundError):
        fa.tuning.load("1")


def test_names_of_implementations():
    pytest.importorskip("transformers")
    taken(fa.compat.transformers.register, dict, "name", None, but=("str",))


def test_what_is_no_module_is_not_converted():
    results = taken(for_torch.convert, dict, "model", None)
    assert results.keys() == {"module"}
