"""Tests wrong values of each kind for each argument of functions, modules, layers, drop-ins, plots and shards."""

import decimal
import math
import re

import pytest
import torch

try:
    import numpy
except ImportError:
    numpy = None

import fusedattn as fa
from fusedattn import distributed, layers, plot
from fusedattn.compat import _bert_padding, flash_attn, torch as for_torch

from .call.test_rules import CACHED, DENSE, PACKED, PAGED
from .close import assert_like
from .mistakes import bools, ones

SCALARS = {
    "str": "1", "bytes": b"1", "list": [1.0], "empty list": [], "tuple": (1, 2), "dict": {}, "object": object(),
    "class": int, "None": None, "True": True, "False": False, "complex": 1j, "Decimal": decimal.Decimal(1),
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "0": 0, "-0.0": -0.0, "-1": -1, "1": 1, "1.5": 1.5,
    "1e39": 1e39, "tiny": 5e-324, "2**31": 2**31, "2**63": 2**63, "10**400": 10**400, "-10**400": -(10**400),
    "float tensor": torch.tensor(1.0), "bool tensor": torch.tensor(True), "int tensor": torch.tensor(1),
    "empty tensor": torch.empty(0), "rank 2": torch.ones(5, 2), "rank 9": torch.ones((1,) * 9),
    "lazy": torch.nn.UninitializedParameter(), "dtype": torch.float32, "module": torch.nn.Identity(),
}  # fmt: skip
if numpy is not None:
    SCALARS |= {"numpy": numpy.ones(3), "numpy rank 0": numpy.array(1.0), "numpy int": numpy.int64(1)}
    SCALARS |= {"numpy bool": numpy.bool_(True), "numpy rank 2": numpy.ones((5, 2))}


def tensors(like):
    """Return {kind: tensor}: tensors that differ from `like` in one property."""
    numbers, rows = like.detach().float(), list(like) if like.dim() and len(like) else [like.reshape(-1)]
    return {
        "int32": like.int(), "int64": like.long(), "uint8": like.to(torch.uint8), "bool": like.bool(),
        "half": like.half(), "double": like.double(), "float8": numbers.to(torch.float8_e4m3fn),
        "complex64": numbers.to(torch.complex64), "sparse": like.to_sparse(), "meta": like.to("meta"),
        "quantised": torch.quantize_per_tensor(numbers, 1.0, 0, torch.quint8), "its list": like.tolist(),
        "mkldnn": numbers.contiguous().to_mkldnn(), "nested": torch.nested.nested_tensor(rows),
        "a row": rows[0], "rank + 1": like[None], "no rows": like[:0], "no columns": like[..., :0],
        "twice the rows": torch.cat([like, like]), "twice the columns": torch.cat([like, like], -1),
        "2**40 of one": like.reshape(-1)[:1].expand(2**40),
    }  # fmt: skip


def taken(function, arguments, name, value, beside=(), but=()):
    """Return {kind: result} of each kind of value that a function accepts for an argument.

    Args:
        arguments: returns all arguments; the one called `name` is then replaced.
        beside: other arguments that the error may name. but: kinds that are not tried.
    Raises: AssertionError if an error does not name the wrong argument in one line.
    """
    every = SCALARS | (tensors(value) if isinstance(value, torch.Tensor) else {})
    results, tried = {}, {kind: x for kind, x in every.items() if kind not in but}
    for kind, x in tried.items():
        try:
            results[kind] = function(**arguments() | {name: x})
        except (ValueError, TypeError) as error:
            text = str(error)
            named = "|".join(map(re.escape, (name, *beside)))
            assert re.fullmatch(rf"(?:{named}): expected .+, got .+", text), (name, kind, text[:300])
        except Exception as error:
            raise AssertionError((name, kind, f"{type(error).__name__}: {error}"[:300])) from error
    return results


B, H, S, E, D = 2, 2, 4, 8, 4
# accepted kinds of value for some arguments
FLAG, FLOATING, MASK = {"True", "False"}, {"None", "half", "double"}, {"None", "bool"}
NUMBERS = {"0", "-0.0", "-1", "1", "1.5", "tiny", "2**31", "2**63"}
POSITIVE = NUMBERS - {"0", "-0.0", "-1"}
SCALE, SIZE, SHARE = NUMBERS | {"float tensor", "int tensor", "None"}, {"1"}, {"0", "-0.0", "1", "tiny"}
SEEDS = {"None", "0", "-1", "1", "2**31", "int tensor", "int64", "a row", "rank + 1"}
TOKENS = MASK | {"a row"}
TOO_LARGE = ("2**31",)  # torch itself raises an error, for lack of memory

OPTIONS = dict(
    causal=(True, FLAG), window=((1, 1), {"None", "tuple"}), align=("top_left", set()), scale=(1.0, SCALE),
    softcap=(1.0, POSITIVE | {"None"}), return_lse=(True, FLAG), return_weights=(True, FLAG),
    backend=("naive", {"None"}),
)  # fmt: skip
NOISE = dict(dropout_p=(0.5, SHARE), seed=(torch.tensor([3]), SEEDS))
KINDS = dict(
    mask=MASK, bias=FLOATING, sinks=FLOATING, alibi_slopes=FLOATING | {"a row"}, key_mask=TOKENS, query_mask=TOKENS,
    block_table={"int32", "twice the columns"}, cache_seqlens={"int32"}, cu_seqlens_q={"int32"}, cu_seqlens_k={"int32"},
    rotary_cos={"half", "double"}, rotary_sin={"half", "double"}, key=set(), query=set(), value={"twice the columns"},
)  # fmt: skip


def tensors_of(arguments, *names, **kinds):
    """Return {argument: (a valid value, other accepted kinds)} of the named arguments, or of all."""
    return {name: (arguments[name], kinds.get(name, KINDS.get(name, set()))) for name in names or arguments}


def required(arguments, *others):
    """Return the arguments that are not options, and the options named in `others`."""
    options = "mask", "bias", "alibi_slopes", "sinks", "key_mask", "query_mask"
    return {name: x for name, x in arguments.items() if name not in options or name in others}


PARTS = dict(out_a=ones(B, S, D), lse_a=ones(B, S), out_b=ones(B, S, D), lse_b=ones(B, S))
PLANNED = dict(mask=bools(B, 1, S, E), key_mask=bools(B, E), query_mask=bools(B, S))
LONGEST = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), (9, {"None"}))
OF_DENSE = tensors_of(DENSE) | OPTIONS | NOISE
OF_PACKED = tensors_of(PACKED, key_mask=MASK, query_mask=MASK) | OPTIONS | NOISE | LONGEST
OF_CACHED = tensors_of(CACHED) | OPTIONS | dict(rotary_interleaved=(True, FLAG))
OF_PLAN = tensors_of(PLANNED, mask=MASK | {"a row"})
CALLS = {
    "attention": (fa.attention, required(DENSE), OF_DENSE),
    "explain": (fa.explain, required(DENSE), OF_DENSE),
    "varlen": (fa.attention_varlen, required(PACKED), OF_PACKED),
    "decode": (fa.attention_decode, required(CACHED), OF_CACHED),
    "pages": (fa.attention_decode, required(PAGED), tensors_of(PAGED, "key_cache", "block_table")),
    "merge": (fa.merge, PARTS, tensors_of(PARTS)),
    "plan": (fa.plan, PLANNED, OF_PLAN),
    "use_backend": (lambda name: fa.use_backend(name).__enter__(), {}, dict(name=("naive", {"None"}))),
}
# {wrong argument: other arguments that its error may name}
TOGETHER = dict(
    query=("key", "key_cache", "cache_seqlens", "cu_seqlens_q"), key=("value",), key_cache=("value_cache",),
    value_cache=("new_value",), cu_seqlens_q=("cu_seqlens_k",), rotary_cos=("rotary_sin",),
    block_table=("cache_seqlens", "key_cache"), out_a=("lse_a", "out_b"), mask=("key_mask", "rows"),
    new_key=("new_value",),
    embed_dim=("num_heads",), hidden_size=("num_attention_heads", "num_heads"), num_heads=("num_kv_heads",),
    input=("hidden",), hidden=("encoder_outputs",),
)  # fmt: skip


def hold(function, arguments, values, but=()):
    """Assert that a function refuses all kinds of value except those in {argument: (a valid value, accepted kinds)}."""
    for name, (value, right) in values.items():
        right = right | {"numpy int"} if "1" in right and "True" not in right else right  # with Python's ints, NumPy's
        results = taken(function, lambda: dict(arguments), name, value, TOGETHER.get(name, ()), but)
        assert results.keys() - {"numpy bool"} <= right, (name, sorted(results.keys() - right))


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    hold(*CALLS[name])


@pytest.mark.parametrize("backend", [None, "triton"])
def test_what_is_taken_gives_what_the_formula_gives(backend, device):
    inputs = {name: torch.randn(DENSE[name].shape, device=device) for name in ("query", "key", "value")}
    for argument, value in (("scale", 1.0), ("softcap", 1.0), ("dropout_p", 0.0), ("window", None), ("seed", 1)):
        more = dict(dropout_p=0.5) if argument == "seed" else dict(seed=3)

        def attend(more=more, **given):
            return fa.attention(**given | dict(backend=backend), **more)

        for kind, out in taken(attend, lambda: inputs, argument, value, but=("None", "int tensor")).items():
            options = more | {argument: SCALARS[kind]}
            assert out.isfinite().all(), (argument, kind)
            assert_like(out, lambda options=options: fa.reference.eager(**inputs, **options))


def test_masks_of_nested_tensors():
    query = torch.nested.nested_tensor([ones(n, 2, D) for n in (3, 4)], layout=torch.jagged).transpose(1, 2)
    given = dict(query=query, key=query, value=query)
    masks = dict.fromkeys(("key_mask", "query_mask"), (bools(2, 4), MASK))
    hold(fa.attention, given, masks | dict(mask=(bools(4, 4), MASK), causal=(True, FLAG)))
    for name in ("key", "value"):
        assert not taken(fa.attention, lambda: given, name, ones(2, 2, 4, D), ("key", "value"))


X = {"no rows", "twice the rows"}
OF_MODULES = OPTIONS | dict(
    dropout=(0.1, SHARE), attention_dropout=(0.1, SHARE), bias=(True, FLAG), scale=(1.0, SCALE | {"1e39"}),
    softcap=(1.0, POSITIVE | {"None", "1e39"}), layer_norm_eps=(1e-5, NUMBERS - {"-1"} | {"1e39"}),
    dtype=(torch.float32, {"None", "dtype"}),
)  # fmt: skip


def options_of(*names, **more):
    return {name: OF_MODULES[name] for name in names} | more


WIDTHS = dict.fromkeys(("kdim", "vdim", "num_kv_heads", "head_dim", "value_head_dim"), (1, SIZE | {"None"}))
KEY_MASK, WEIGHTS, ROWS = (bools(B, S), TOKENS), (True, FLAG), ones(B, S, E)
MASKS = dict(mask=(bools(S, S), MASK | {"rank + 1"}), key_mask=KEY_MASK)
ENCODER = dict(hidden_size=8, num_attention_heads=2, intermediate_size=16)
ENCODED = "dropout", "attention_dropout", "bias", "causal", "window", "scale", "backend", "softcap", "layer_norm_eps"
LAYERS = [  # class, sizes, more options, inputs, more inputs; all but sizes with right kinds
    (fa.MultiHeadAttention, dict(embed_dim=8, num_heads=2),
     options_of("dropout", "bias", "scale", "backend", "causal", "window", "softcap", "dtype", **WIDTHS),
     dict(query=(ROWS, X)),
     MASKS | dict(key=(ROWS, {"None"}), value=(ROWS, {"None"}), query_mask=KEY_MASK, need_weights=WEIGHTS,
                  bias=(ones(S, S), FLOATING | {"rank + 1"}))),
    (fa.SelfAttention, dict(embed_dim=8), options_of("dropout", "bias", "scale", "backend"), dict(x=(ROWS, X)),
     MASKS | dict(need_weights=WEIGHTS)),
    (layers.SinusoidalPositionalEncoding, dict(embed_dim=8, max_len=5), {}, dict(x=(ROWS, X | {"half", "double"})), {}),
    (layers.Embeddings, dict(vocab_size=7, hidden_size=8, max_position_embeddings=5),
     options_of("dropout", "layer_norm_eps"),
     dict(input_ids=(ones(B, S).long(), X | {"int32", "int64", "no columns"})), {}),
    (layers.FeedForward, dict(hidden_size=8, intermediate_size=16), options_of("dropout"),
     dict(x=(ROWS, X | {"a row", "rank + 1"})), {}),
    (layers.TransformerEncoderLayer, ENCODER, options_of(*ENCODED), dict(x=(ROWS, X)), MASKS),
    (layers.TransformerEncoder, dict(num_hidden_layers=1) | ENCODER, {}, dict(x=(ROWS, X)), MASKS),
    (layers.AttentionDecoder, dict(vocab_size=7, embed_size=8, hidden_size=8, encoder_size=8),
     options_of("dropout", "scale", "backend", num_attentions=(1, SIZE), num_heads=(1, SIZE)),
     dict(input=(ones(B).long(), {"int32", "int64"}), hidden=(ones(B, E), set()), encoder_outputs=(ROWS, set())),
     dict(key_mask=KEY_MASK, need_weights=WEIGHTS)),
    (for_torch.MultiheadAttention, dict(embed_dim=8, num_heads=2),
     options_of("dropout", kdim=(1, SIZE | {"None"}), vdim=(1, SIZE | {"None"}), bias=WEIGHTS, add_bias_kv=WEIGHTS,
                add_zero_attn=WEIGHTS, batch_first=WEIGHTS),
     dict.fromkeys(("query", "key", "value"), (ROWS, set())),
     dict(attn_mask=(torch.zeros(S, S), FLOATING | {"bool"}), need_weights=WEIGHTS, is_causal=(False, {"False"}))),
]  # fmt: skip


@pytest.mark.parametrize("row", LAYERS, ids=lambda row: row[0].__name__)
def test_modules_and_layers(row):
    cls, sizes, options, inputs, more = row
    flags = ("0", "1") if cls is for_torch.MultiheadAttention else ()  # torch accepts these as flags
    hold(cls, sizes, {name: (x, SIZE) for name, x in sizes.items()}, but=TOO_LARGE)
    hold(cls, sizes, options, but=(*TOO_LARGE, *flags))
    layer = cls(**sizes, **(dict(batch_first=True) if flags else {}))
    hold(layer, {name: x for name, (x, _) in inputs.items()}, inputs | more, but=flags)


ATTENDED = dict(query=ones(B, H, S, D), key=ones(B, H, S, D), value=ones(B, H, S, D))


def test_torchs_function():
    function, more = for_torch.scaled_dot_product_attention, dict(is_causal=WEIGHTS, enable_gqa=WEIGHTS)
    more |= dict(attn_mask=(ones(S, S), {"None", "bool", "rank + 1"}), dropout_p=(0.1, SHARE), scale=(1.0, SCALE))
    hold(function, ATTENDED, more)
    for name, x in ATTENDED.items():
        taken(function, lambda: ATTENDED, name, x, ATTENDED)


def test_flash_attns_functions():
    x, cache, lengths = ones(B, S, H, D), ones(B, S, H, D), torch.tensor([1, 2], dtype=torch.int32)
    options = dict(
        dropout_p=(0.1, SHARE), softmax_scale=(1.0, SCALE), causal=WEIGHTS, deterministic=WEIGHTS,
        window_size=((1, 1), {"tuple"}), softcap=(1.0, POSITIVE | {"None"} | {"0", "-0.0"}),
        alibi_slopes=(ones(H), FLOATING), return_attn_probs=WEIGHTS,
    )  # fmt: skip
    hold(flash_attn.flash_attn_func, dict(q=x, k=x, v=x), options)
    given = dict(q=ones(B, 1, H, D), k_cache=cache, v_cache=cache.clone(), cache_seqlens=lengths)
    shared = {name: options[name] for name in ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")}
    shared |= dict(return_softmax_lse=WEIGHTS, rotary_interleaved=WEIGHTS)
    hold(flash_attn.flash_attn_with_kvcache, given, shared)
    for name, x in given.items():
        taken(flash_attn.flash_attn_with_kvcache, lambda: given, name, x, given)


def test_flash_attns_padding():
    x, mask = ones(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    real = {"int32", "int64", "uint8", "bool", "half", "double"}
    masks = dict(attention_mask=(mask, real), unused_mask=(1 - mask, real | {"None"}))
    hold(_bert_padding.unpad_input, dict(hidden_states=x, attention_mask=mask), masks)
    given = dict(attention_mask=mask)
    taken(_bert_padding.unpad_input, lambda: given, "hidden_states", x, given, but=("quantised",))
    rows, places, *_ = _bert_padding.unpad_input(x, mask)
    given = dict(hidden_states=rows, indices=places, batch=2, seqlen=4)
    for name, value in given.items():
        taken(_bert_padding.pad_input, lambda: given, name, value, ("indices",), but=(*TOO_LARGE, "quantised"))


def test_the_function_that_transformers_calls():
    pytest.importorskip("transformers")
    function = fa.compat.transformers.fusedattn_forward
    for name, value in ATTENDED.items():
        taken(function, lambda: dict(module=None) | ATTENDED, name, value, ATTENDED, but=("lazy",))
    masks = dict(attention_mask=(bools(S, S), {"None", "bool", "half", "double"}), scaling=(1.0, SCALE))
    for name, (value, _) in masks.items():
        taken(function, lambda: dict(module=None) | ATTENDED, name, value, ("mask", "bias", "scale"))


def test_pictures():
    pytest.importorskip("matplotlib")
    more = dict(mask=(bools(3, 4), {"None", "bool", "bool tensor", "a row", "rank + 1"}), label=("x", {"str"}))
    more |= dict(top=(1.0, NUMBERS - {"0", "-0.0", "-1"} | {"None", "1e39"}), figure=(None, {"None"}))
    more |= dict(titles=(["a", "b"], {"None", "tuple"}), key_tokens=("abcd", {"None"}))
    more |= dict(tokens=("abc", {"None", "numpy"}))
    hold(plot.attention_map, dict(weights=torch.rand(2, 3, 4)), more, but=("lazy",))
    hold(plot.positional_encoding, dict(pe=ones(3, 4)), dict(figure=more["figure"]))
    real = {"int32", "int64", "uint8", "bool", "half", "double", "float8", "rank + 1", "rank 2"}
    sizes = {"a row", "twice the rows", "twice the columns"}
    hold(plot.attention_map, {}, dict(weights=(torch.rand(2, 3, 4), real | sizes)), but=("2**40 of one", "rank + 1"))
    hold(plot.positional_encoding, {}, dict(pe=(ones(3, 4), real | sizes - {"a row"})), but=("2**40 of one",))


def test_shards():
    balance, group = ("zigzag", {"None"}), (None, {"None"})
    length = dict(length=(3, {"0", "1"}), group=group, balance=balance)
    hold(distributed.positions, dict(length=3), length, but=TOO_LARGE)
    for function in (distributed.shard, distributed.unshard):
        hold(function, dict(x=ones(2, 3), dim=1), dict(dim=(1, {"0", "-1", "1"}), group=group, balance=balance))
        taken(function, lambda: dict(x=ones(2, 3), dim=1), "x", ones(2, 3), ("dim",), but=("lazy",))
    methods = distributed.ring_attention, distributed.gather_attention, distributed.ulysses_attention
    more = dict(balance=balance, group=group, causal=WEIGHTS, scale=(1.0, SCALE), seed=(1, SEEDS))
    for function in methods:
        lacks = ("balance",) if function is distributed.ulysses_attention else ()
        hold(function, ATTENDED, {name: x for name, x in more.items() if name not in lacks})
        for name, x in ATTENDED.items():
            taken(function, lambda: ATTENDED, name, x, ATTENDED, but=("lazy",))


def test_what_is_cut_loaded_converted_and_registered(tmp_path, monkeypatch):
    def module(method="ring", group=None, balance=None):
        return fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel(method, group, balance))

    for argument, right in (("method", set()), ("balance", {"None"})):
        assert taken(module, dict, argument, None, ("context_parallel",)).keys() <= right
    monkeypatch.chdir(tmp_path)
    taken(fa.tuning.load, dict, "file", None, but=("str",))
    with pytest.raises(FileNotFoundError):
        fa.tuning.load("1")
    assert taken(for_torch.convert, dict, "model", None).keys() == {"module"}
    pytest.importorskip("transformers")
    taken(fa.compat.transformers.register, dict, "name", None, but=("str",))
