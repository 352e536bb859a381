"""Operators that are called by their names are as safe as the functions: what is wrong raises before a launch."""

import contextlib
import io

import pytest
import torch
from torch.autograd import forward_ad

import fusedattn as fa
from fusedattn.call.form import INPUTS, WHOLE
from fusedattn.cpu import cached, flash
from fusedattn.operators.namespace import OPERATORS
from fusedattn.private import multiplies_bfloat16

from ..inside import fields, leaves, leaves_of, same
from ..sequences import offsets

B, HQ, HKV, SQ, SK, D, DV, POSITIONS = 2, 4, 2, 3, 5, 8, 6, 7
TQ, TK, LONGEST = 7, 9, dict(max_seqlen_q=4, max_seqlen_k=4)
NAMES = dict(
    cu_seqlens_q="cu_seqlens_q", cu_seqlens_k="cu_seqlens_k", max_seqlen_q="max_seqlen_q", max_seqlen_k="max_seqlen_k"
)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def ones(*shape):
    return torch.ones(shape)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def named(call):
    """The fields of a Call by the names that the operators give them."""
    return {NAMES.get(name, name): x for name, x in call._asdict().items()}


DENSE = named(fields(ones(B, HQ, SQ, D), ones(B, HKV, SK, D), ones(B, HKV, SK, DV)))
OFFSETS = dict(cu_seqlens_q=offsets((3, 0, 4)), cu_seqlens_k=offsets((2, 3, 4)))
PACKED = named(fields(ones(1, HQ, TQ, D), ones(1, HKV, TK, D), ones(1, HKV, TK, DV))) | OFFSETS
ON = dict(named=True, backend="triton")
AFTER = dict(need_lse=True, need_weights=False, save=True, backend="triton")
INCOMING = dict(grad_out=ones(B, HQ, SQ, DV), grad_lse=ones(B, HQ, SQ), grad_weights=ones(B, HQ, SQ, SK))
KEPT = dict(out=ones(B, HQ, SQ, DV), weights=ones(B, HQ, SQ, SK), stats=ones(B, HQ, SQ, 2))
MASKS = dict(mask=bools(B, 1, SQ, SK), key_mask=bools(1, SK), query_mask=bools(B, SQ), bias=ones(1, HQ, 1, SK))
WHOLE_MASKS = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "rows", "keys", *LONGEST), WHOLE, strict=True))
PACKED_MASKS = dict(mask=None, key_mask=bools(1, TK), query_mask=None, bias=None) | OFFSETS
TURNING = dict(rotary_cos=ones(POSITIONS, 2), rotary_sin=ones(POSITIONS, 2), rotary_interleaved=False)
CACHES = dict(key_cache=ones(3, HKV, 4, D), value_cache=ones(3, HKV, 4, DV), cache_seqlens=ints(2, 5))
CACHES |= dict(block_table=ints((0, 1), (2, 2)))
NUMBERS = dict(left=None, right=None, top_left=False, scale=0.5, softcap=None, need_lse=True) | ON
OPTIONS = dict.fromkeys(("bias", "alibi_slopes", "sinks", "mask", "key_mask", "query_mask"))
WANTED = [True, True, True, False, False, False]  # of backward: query, key and value
RIGHT = {  # arguments that an operator takes
    "forward": DENSE | AFTER,
    "packed forward": PACKED | AFTER,
    "backward": INCOMING | KEPT | DENSE | dict(backend="triton", need=WANTED),
    "block_mask": MASKS | WHOLE_MASKS,
    "packed block_mask": PACKED_MASKS | dict(rows=TQ, keys=TK) | LONGEST,
    "append": CACHES | dict(new_key=ones(B, HKV, 1, D), new_value=ones(B, HKV, 1, DV)) | TURNING | ON,
    "decode": dict(query=ones(B, HQ, SQ, D)) | CACHES | dict(added=1) | TURNING | OPTIONS | NUMBERS,
}
KNOWN = "expected one of 'hopper', 'triton', 'cpu'"
WRONG = {  # argument that is named, error, what the sentence must say, what is changed
    "forward": [
        ("query", ValueError, "rank 4, got (3, 8)", dict(query=ones(SQ, D))),
        ("query", TypeError, "a floating dtype", dict(query=ones(B, HQ, SQ, D).int())),
        ("key", TypeError, "torch.float32, got torch.float16", dict(key=ones(B, HKV, SK, D).half())),
        ("key", ValueError, "the device of query", dict(key=ones(B, HKV, SK, D).to("meta"))),
        ("key", ValueError, "the batch size of query, 2", dict(key=ones(1, HKV, SK, D))),
        ("key", ValueError, "the head dimension of query, 8", dict(key=ones(B, HKV, SK, D + 1))),
        ("key", ValueError, "divides the 4", dict(key=ones(B, 3, SK, D), value=ones(B, 3, SK, DV))),
        ("value", ValueError, "as in key, (2, 2, 5, 8)", dict(value=ones(B, HKV, SK - 1, DV))),
        ("bias", ValueError, "rank 4, got (3, 5)", dict(bias=ones(SQ, SK))),
        ("bias", ValueError, "broadcastable to (2, 4, 3, 5)", dict(bias=ones(B, HKV, SQ, SK))),
        ("bias", TypeError, "a floating tensor", dict(bias=bools(B, HQ, SQ, SK))),
        ("mask", TypeError, "a bool tensor", dict(mask=ones(B, HQ, SQ, SK))),
        ("mask", ValueError, "rank 4", dict(mask=bools(SQ, SK))),
        ("mask", ValueError, "broadcastable", dict(mask=bools(B, HQ, SQ, SK + 1))),
        ("key_mask", ValueError, "rank 2", dict(key_mask=bools(SK))),
        ("key_mask", ValueError, "shape (2, 5)", dict(key_mask=bools(1, SQ))),
        ("query_mask", ValueError, "shape (2, 3)", dict(query_mask=bools(3, SQ))),
        ("query_mask", TypeError, "a bool tensor", dict(query_mask=ones(B, SQ))),
        ("alibi_slopes", ValueError, "shape (1, 4) or (2, 4)", dict(alibi_slopes=ones(HQ))),
        ("sinks", ValueError, "shape (1, 4) or (2, 4)", dict(sinks=ones(3, HQ))),
        ("sinks", TypeError, "a floating tensor", dict(sinks=bools(1, HQ))),
        ("seed", ValueError, "a tensor beside dropout_p", dict(dropout_p=0.5)),
        ("seed", ValueError, "one element", dict(dropout_p=0.5, seed=torch.ones(2).long())),
        ("seed", TypeError, "one int64", dict(dropout_p=0.5, seed=ints(1))),
        ("dropout_p", ValueError, "from 0 to 1", dict(dropout_p=1.5)),
        ("scale", ValueError, "finite", dict(scale=float("nan"))),
        ("softcap", ValueError, "above 0", dict(softcap=0.0)),
        ("left", ValueError, "no negative number", dict(left=-1)),
        ("right", ValueError, "no negative number", dict(right=-2)),
        ("block_mask", TypeError, "uint8", dict(mask=bools(B, 1, SQ, SK), block_mask=ones(B, 1, 1, 1))),
        ("block_mask", ValueError, "broadcastable to (2, 4, 1, 1)", dict(block_mask=ones(1, 1, 1, 2).to(torch.uint8))),
        ("block_mask", ValueError, "rank 4", dict(block_mask=ones(1, 1, 1).to(torch.uint8))),
        ("query", ValueError, "a batch of 1 beside cu_seqlens_q", dict(OFFSETS)),
        ("backend", ValueError, "another where it knows no key_mask", dict(key_mask=bools(1, SK), backend="hopper")),
        ("backend", ValueError, "another where it knows no softcap", dict(softcap=2.0, backend="hopper")),
        ("backend", ValueError, "float16 and bfloat16, not torch.float32", dict(backend="hopper")),
        ("backend", ValueError, KNOWN, dict(backend="other")),
    ],
    "packed forward": [
        ("cu_seqlens_k", TypeError, "a tensor, got NoneType", dict(cu_seqlens_k=None)),
        ("cu_seqlens_q", TypeError, "a tensor, got NoneType", dict(cu_seqlens_q=None)),
        ("cu_seqlens_q", TypeError, "int32", dict(cu_seqlens_q=offsets((3, 0, 4)).long())),
        ("cu_seqlens_q", ValueError, "shape (n + 1,)", dict(cu_seqlens_q=ints())),
        ("cu_seqlens_q", ValueError, "a sequence", dict(cu_seqlens_q=ints(0), cu_seqlens_k=ints(0))),
        ("cu_seqlens_k", ValueError, "as many as cu_seqlens_q has, 4", dict(cu_seqlens_k=ints(0, TK))),
        ("max_seqlen_q", ValueError, "0 or more", LONGEST | dict(max_seqlen_q=-1)),
        ("max_seqlen_k", ValueError, "an int beside", dict(max_seqlen_q=4, key_mask=bools(1, TK))),
        ("max_seqlen_q", ValueError, "an int beside", dict(max_seqlen_k=4, need_weights=True)),
        ("key_mask", ValueError, "shape (1, 9)", LONGEST | dict(key_mask=bools(1, TK - 1))),
        ("query_mask", ValueError, "shape (1, 7)", dict(query_mask=bools(1, TQ + 1))),
        ("bias", ValueError, "broadcastable to (3, 4, 4, 4)", LONGEST | dict(bias=ones(2, HQ, 4, 4))),
        ("alibi_slopes", ValueError, "(3, 4)", dict(alibi_slopes=ones(2, HQ))),
    ],
    "backward": [
        ("key", ValueError, "the batch size of query, 2", dict(key=ones(1, HKV, SK, D))),
        ("grad_out", ValueError, "shape (2, 4, 3, 6)", dict(grad_out=ones(B, HQ, SQ, DV - 1))),
        ("grad_out", TypeError, "torch.float32", dict(grad_out=INCOMING["grad_out"].half())),
        ("grad_lse", ValueError, "shape (2, 4, 3)", dict(grad_lse=ones(B, HQ, SK))),
        ("grad_lse", TypeError, "a floating tensor", dict(grad_lse=INCOMING["grad_lse"].int())),
        ("grad_weights", ValueError, "shape (2, 4, 3, 5)", dict(grad_weights=ones(B, HQ, SQ, 1))),
        ("out", ValueError, "shape (2, 4, 3, 6)", dict(out=ones(B, HQ, 1, DV))),
        ("out", ValueError, "the device of query", dict(out=KEPT["out"].to("meta"))),
        ("weights", ValueError, "as forward returns it, got (0,)", dict(weights=ones(0))),
        ("stats", ValueError, "shape (2, 4, 3, 2), as forward returns it, got (0,)", dict(stats=ones(0))),
        ("stats", TypeError, "torch.float32", dict(stats=KEPT["stats"].half())),
        ("need", ValueError, "False for bias, which is None", dict(need=[True] * len(INPUTS))),
        ("need", ValueError, "6 bools", dict(need=[True] * 3)),
        ("backend", ValueError, KNOWN, dict(backend="")),
        ("backend", ValueError, "float16 and bfloat16, not torch.float32", dict(backend="hopper")),
    ],
    "block_mask": [
        ("mask", ValueError, "rank 4", dict(mask=bools(SQ, SK))),
        ("mask", TypeError, "a bool tensor", dict(mask=ones(B, 1, SQ, SK))),
        ("key_mask", ValueError, "rank 2", dict(key_mask=bools(SK))),
        (
            "key_mask",
            ValueError,
            "fits the other masks, (2, 1, 3, 5), got (1, 6)",
            dict(key_mask=bools(1, SK + 1)),
        ),
        ("query_mask", ValueError, "fits the other masks", dict(query_mask=bools(3, SQ))),
        ("query_mask", ValueError, "the device of the other masks", dict(query_mask=bools(B, SQ).to("meta"))),
        ("bias", TypeError, "a floating tensor", dict(bias=bools(B, 1, SQ, SK))),
        ("bias", ValueError, "fits the other masks", dict(bias=ones(B, 1, SQ, SK + 1))),
    ],
    "packed block_mask": [
        ("key_mask", ValueError, "shape (1, 9), of all packed rows", dict(key_mask=bools(1, TK - 1))),
        ("query_mask", ValueError, "shape (1, 7)", dict(query_mask=bools(1, TQ + 1))),
        ("max_seqlen_k", ValueError, "an int beside key_mask", dict(max_seqlen_k=None)),
        ("cu_seqlens_k", TypeError, "a tensor", dict(cu_seqlens_k=None)),
        ("cu_seqlens_q", TypeError, "int32", dict(cu_seqlens_q=OFFSETS["cu_seqlens_q"].long())),
        ("rows", ValueError, "0 or more, got -7", dict(rows=-TQ)),
        ("mask", ValueError, "rank 4", dict(mask=bools(1, 1, 4))),
        ("key_mask", ValueError, "fits the other masks", dict(mask=bools(1, 1, 4, 5))),
    ],
    "append": [
        ("key_cache", ValueError, "rank 4", dict(key_cache=ones(HKV, 4, D))),
        ("key_cache", ValueError, "1 or more", dict(key_cache=ones(3, HKV, 4, 0))),
        ("key_cache", ValueError, "no dimension expanded", dict(key_cache=ones(1, HKV, 4, D).expand(3, -1, -1, -1))),
        ("key_cache", ValueError, "or a block_table", dict(block_table=None)),
        ("value_cache", ValueError, "as in key_cache", dict(value_cache=ones(3, HKV, 5, DV))),
        ("cache_seqlens", ValueError, "rank 1", dict(cache_seqlens=ints((1, 2)))),
        ("cache_seqlens", TypeError, "int32", dict(cache_seqlens=ints(1, 2).long())),
        ("block_table", ValueError, "shape (2, pages of a sequence)", dict(block_table=ints((0, 1)))),
        ("new_key", ValueError, "shape (2, 2, new, 8)", dict(new_key=ones(B, 1, 1, D))),
        ("new_key", ValueError, "shape (2, 2, new, 8)", dict(new_key=ones(B, HKV, 1, D + 1))),
        ("new_value", ValueError, "as many as new_key", dict(new_value=ones(B, HKV, 2, DV))),
        ("new_value", TypeError, "torch.float32", dict(new_value=ones(B, HKV, 1, DV).half())),
        ("rotary_sin", ValueError, "a tensor beside rotary_cos", dict(rotary_sin=None)),
        ("rotary_cos", ValueError, "shape (positions", dict(rotary_cos=ones(7, 5), rotary_sin=ones(7, 5))),
        ("rotary_sin", ValueError, "the shape of rotary_cos, (7, 2)", dict(rotary_sin=ones(6, 2))),
        ("backend", ValueError, KNOWN, dict(backend="naive")),
    ],
    "decode": [
        ("query", ValueError, "rank 4", dict(query=ones(HQ, SQ, D))),
        ("key_cache", ValueError, "divides the 4", dict(key_cache=ones(3, 3, 4, D), value_cache=ones(3, 3, 4, DV))),
        ("cache_seqlens", ValueError, "shape (2,)", dict(cache_seqlens=ints(1, 2, 3))),
        ("block_table", ValueError, "shape (2, pages of a sequence)", dict(block_table=ints(0, 1))),
        ("rotary_sin", ValueError, "the shape of rotary_cos", dict(rotary_sin=ones(1, 2))),
        ("key_mask", ValueError, "shape (2, 8)", dict(key_mask=bools(B, 4))),
        ("mask", ValueError, "broadcastable to (2, 4, 3, 8)", dict(mask=bools(1, 1, SQ, 9))),
        ("sinks", ValueError, "shape (1, 4)", dict(sinks=ones(HQ))),
        ("added", ValueError, "0 or more", dict(added=-1)),
        ("left", ValueError, "no negative number", dict(left=-1)),
        ("backend", ValueError, KNOWN, dict(backend="naive")),
    ],
}


def moved(arguments, device):
    """To a device, but for what lies on none: meta tensors are there to be elsewhere."""
    return {
        name: x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
        for name, x in arguments.items()
    }


def operator(name):
    return getattr(OPERATORS, name.removeprefix("packed "))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_before_a_launch(name, device, monkeypatch):
    from fusedattn.launch import run

    operator(name)(**moved(RIGHT[name], device))
    monkeypatch.setattr(run, "run_kernel", None)  # a launch would fail
    monkeypatch.setattr(run, "capability", None)  # which meta tensors have none of
    for argument, error, text, changed in WRONG[name]:
        given = RIGHT[name] | changed
        for where in (device, "meta"):
            if (where == "meta" and "device" in text) or (where != "cpu" and "expanded" in text):
                continue  # on their way there tensors become dense
            with pytest.raises(error) as raised:
                operator(name)(**moved(given, where))
            message = str(raised.value)
            assert message.startswith(f"{argument}: expected ") and ", got " in message and "\n" not in message, message
            assert text in message


ON_CPU = dict(backend="cpu")
RIGHT_ON_CPU = {name: RIGHT[name] | ON_CPU for name in ("forward", "packed forward", "backward", "append", "decode")}
RIGHT_ON_CPU["backward"] |= dict(grad_weights=None, stats=ones(B, HQ, SQ, 1))
NOISE = dict(dropout_p=0.5, seed=torch.ones(1).long())
WRONG_ON_CPU = {
    "forward": [
        ("query", ValueError, "rank 4, got (3, 8)", dict(query=ones(SQ, D))),
        ("backend", ValueError, "another where it knows no softcap", dict(softcap=2.0)),
        ("backend", ValueError, "another where it knows no dropout", NOISE),
        ("backend", ValueError, "are on meta, not on a CPU", moved(DENSE, "meta")),
    ],
    "packed forward": [
        ("cu_seqlens_k", TypeError, "a tensor, got NoneType", dict(cu_seqlens_k=None)),
        ("max_seqlen_k", ValueError, "an int beside", dict(max_seqlen_q=4, key_mask=bools(1, TK))),
        ("backend", ValueError, "another where it knows no softcap", dict(softcap=2.0)),
    ],
    "backward": [
        ("stats", ValueError, "shape (2, 4, 3, 1), as forward returns it", dict(stats=KEPT["stats"])),
        ("need", ValueError, "False for alibi_slopes, which is None", dict(need=[False] * 4 + [True, False])),
        ("backend", ValueError, "another where it knows no softcap", dict(softcap=2.0)),
        ("backend", ValueError, "another where it knows no dropout", NOISE),
    ],
    "append": [("new_key", ValueError, "shape (2, 2, new, 8)", dict(new_key=ones(B, 1, 1, D)))],
    "decode": [
        ("query", ValueError, "rank 4", dict(query=ones(HQ, SQ, D))),
        ("backend", ValueError, "another where it knows no softcap", dict(softcap=2.0)),
    ],
}


@pytest.mark.parametrize("name", WRONG_ON_CPU)
def test_a_wrong_argument_is_named_before_anything_is_computed_on_a_cpu(name, monkeypatch):
    operator(name)(**RIGHT_ON_CPU[name])
    for module, function in ((flash, "forward"), (flash, "backward"), (cached, "append")):
        monkeypatch.setattr(module, function, None)  # a call would fail
    for argument, error, text, changed in WRONG_ON_CPU[name]:
        with pytest.raises(error) as raised:
            operator(name)(**RIGHT_ON_CPU[name] | changed)
        message = str(raised.value)
        assert message.startswith(f"{argument}: expected ") and ", got " in message and "\n" not in message, message
        assert text in message


HOSTILE = {
    "beyond": ((0, 3, 50, 100), (0, 2, 2**31 - 1, 2**31 - 1)),
    "negative": ((-5, -3, 2, 7), (-(2**31), 0, 4, 9)),
    "both": ((-1, 2, 6, 8), (-9, 3, 9, 10)),
    "decreasing": ((0, 5, 2, 7), (0, 6, 3, 9)),
    "all decreasing": ((7, 5, 2, 0), (9, 6, 3, 0)),
    "anywhere": ((4, 100, -7, 3), (9, 0, 2**31 - 1, -1)),
}
HIDING = {
    "plain": lambda rows, keys: {},
    "causal": lambda rows, keys: dict(right=0),
    "window": lambda rows, keys: dict(left=2, right=1, top_left=True),
    "tokens": lambda rows, keys: dict(key_mask=torch.rand(1, TK) < 0.7, query_mask=torch.rand(1, TQ) < 0.7),
    "mask": lambda rows, keys: dict(mask=torch.rand(3, 1, rows, keys) < 0.7),
    "bias": lambda rows, keys: dict(bias=torch.randn(1, HQ, rows, keys), sinks=torch.randn(1, HQ)),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_an_absent_tensor_is_named(name, gradient, device):
    """Also where a gradient is asked, which Functions compute before an operator is called."""
    given = moved(RIGHT[name], device)
    if gradient:
        given = dict(zip(given, leaves_of(given.values()), strict=True))
    for argument in operator(name).default._schema.arguments:
        if str(argument.type) == "Tensor" and isinstance(given[argument.name], torch.Tensor):
            others = [x for key, x in given.items() if key != argument.name and isinstance(x, torch.Tensor)]
            if not gradient or any(x.requires_grad for x in others):
                with pytest.raises(TypeError, match=f"^{argument.name}: expected a tensor, got NoneType"):
                    operator(name)(**given | {argument.name: None})


@pytest.mark.parametrize("name", ["forward", "packed forward", "backward"])
def test_a_wrong_argument_is_named_where_a_gradient_is_asked(name, device):
    """An unchecked size was read out of bounds, which ended the process."""
    for argument, error, _, changed in WRONG[name]:
        given = moved(RIGHT[name] | changed, device)
        given = dict(zip(given, leaves_of(given.values()), strict=True))
        with pytest.raises(error, match=f"^{argument}: expected "):
            operator(name)(**given)


def _among_nan(*shape):
    """A tensor of some tokens, and all of its memory: others before and behind them are NaN."""
    heads, tokens, columns = shape
    whole = torch.full((1, heads, 3 * tokens, columns), float("nan"))
    part = whole[:, :, tokens : 2 * tokens]
    return part.copy_(torch.randn(part.shape)), whole


def _packed_on_cpu(inputs, offsets, most, need_weights, options):
    """Everything that both passes give."""
    longest = dict(zip(LONGEST, most, strict=True))
    cu_seqlens = {name: ints(*x) for name, x in zip(OFFSETS, offsets, strict=True)}
    call = fields(*inputs, **cu_seqlens, **longest, **options)
    kept = OPERATORS.forward(*call, True, need_weights, True, "cpu")
    out, lse, weights, stats = kept
    incoming = out.cos(), lse.nan_to_num(0, 0, 0).cos(), None
    return *kept, *OPERATORS.backward(*incoming, out, weights, stats, *call, "cpu", WANTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("wrong", HOSTILE)
def test_wrong_offsets_read_and_write_nothing_outside_on_a_cpu(wrong, hiding, dtype):
    """What is before and behind the tokens is NaN, and stays; offsets beyond either end are as if they were there."""
    made = [_among_nan(*shape) for shape in ((HQ, TQ, D), (HKV, TK, D), (HKV, TK, DV))]
    wholes = [whole.to(dtype) for _, whole in made]
    inputs = [whole[:, :, n : 2 * n] for whole, n in zip(wholes, (TQ, TK, TK), strict=True)]
    before, options = [whole.clone() for whole in wholes], HIDING[hiding](TQ, TK)
    got = _packed_on_cpu(inputs, HOSTILE[wrong], (TQ, TK), True, options)
    assert not any(x.isnan().any() for x in got)
    for x, was in zip(wholes, before, strict=True):
        same(x.nan_to_num(7.0), was.nan_to_num(7.0))
    inside = [[min(max(x, 0), n) for x in each] for each, n in zip(HOSTILE[wrong], (TQ, TK), strict=True)]
    assert all(map(torch.equal, got, _packed_on_cpu(inputs, inside, (TQ, TK), True, options)))


@pytest.mark.parametrize("most", [(4, 4), (1, 4), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("hiding", ["plain", "mask", "bias"])
@pytest.mark.parametrize("wrong", HOSTILE)
def test_sequences_longer_than_the_longest_raise_or_are_right_on_a_cpu(wrong, hiding, most):
    inputs = [_among_nan(*shape)[0] for shape in ((HQ, TQ, D), (HKV, TK, D), (HKV, TK, DV))]
    for need_weights in (False, True):
        with contextlib.suppress(RuntimeError):
            got = _packed_on_cpu(inputs, HOSTILE[wrong], most, need_weights, HIDING[hiding](*most))
            assert not any(x.isnan().any() for x in got)


@pytest.mark.parametrize("lengths", [(-5, 4), (2**31 - 1, 2), (-(2**31), 5)], ids=str)
@pytest.mark.parametrize("pages", [None, ((0, 1), (2, 2)), ((-1, 2**31 - 1), (-(2**31), 3))], ids=str)
def test_wrong_lengths_and_pages_read_and_write_nothing_outside_on_a_cpu(lengths, pages):
    count = 3 if pages else B
    wholes = [torch.full((3 * count, HKV, 4, n), float("nan")) for n in (D, DV)]
    caches = [whole[count : 2 * count].normal_() for whole in wholes]
    given = dict(key_cache=caches[0], value_cache=caches[1], cache_seqlens=ints(*lengths))
    given["block_table"] = None if pages is None else ints(*pages)
    operator("append")(**RIGHT_ON_CPU["append"] | given)
    out, lse = operator("decode")(**RIGHT_ON_CPU["decode"] | given | dict(right=0))
    assert out.isfinite().all() and not lse.isnan().any()
    for whole in wholes:
        assert whole[:count].isnan().all() and whole[2 * count :].isnan().all()


def test_arguments_that_passed_are_not_looked_at_again_and_others_are(device, monkeypatch):
    from fusedattn.operators import namespace

    looked = []
    check = namespace._once(lambda *arguments: looked.append(arguments))
    monkeypatch.setattr(namespace, "MOST", 2)
    x = torch.zeros(2, 3, device=device)
    for arguments in ((x, 1, [True]), (x + 1, 1, [True]), (x.T, 1, [True]), (x, 2, [True]), (x, 2, [False])):
        check(*arguments)
    assert [arguments[1:] for arguments in looked] == [(1, [True]), (1, [True]), (2, [True]), (2, [False])]
    check(x.half(), 1, [True])
    assert len(looked) == 5


def _dense(device):
    query, key, value = (DENSE[name].to(device) for name in ("query", "key", "value"))
    return [torch.randn_like(x) for x in (query, key, value)]


@pytest.fixture(params=["triton", "cpu"])
def backend(request, device):
    if request.param == "cpu" != device:
        pytest.skip("about CPU tensors")
    return request.param


@pytest.mark.parametrize("options", [{}, dict(dropout_p=0.5, seed=3)], ids=["plain", "dropout"])
def test_a_forward_that_saved_nothing_has_its_gradient(options, device, backend):
    if backend == "cpu" and options:
        pytest.skip("it knows no dropout")
    inputs = leaves(*_dense(device))
    given = dict(options, seed=torch.tensor([3], device=device)) if options else {}
    out, *_ = OPERATORS.forward(*fields(*inputs, right=0, **given), False, False, False, backend)
    want = fa.attention(*inputs, causal=True, scale=0.25, **options, backend=backend)
    same(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, want)))


@pytest.mark.filterwarnings("ignore")
def test_a_program_exported_without_gradients_has_them(device):
    class Block(torch.nn.Module):
        def forward(self, query, key, value, cu_q, cu_k):
            out = fa.attention(query, key, value, causal=True, backend="triton")
            cu = dict(max_seqlen_q=4, max_seqlen_k=4)
            packed = (x.flatten(0, 1) for x in (query, key, value))
            return out, fa.attention_varlen(*packed, cu_q, cu_k, **cu, backend="triton")

    query, key, value = (torch.randn(2, 3, 4, 8, device=device) for _ in range(3))
    rows = offsets((3, 2, 1), device)
    inputs = leaves(query, key, value)
    with torch.no_grad():
        program = torch.export.export(Block(), (*inputs, rows, rows), strict=True)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for x in inputs:
        x.requires_grad_()
    got, want = (
        torch.autograd.grad(sum(x.square().sum() for x in block(*inputs, rows, rows)), inputs)
        for block in (loaded, Block())
    )
    same(got, want)


@pytest.mark.parametrize("transform", ["jvp", "grad"])
def test_a_tangent_is_not_dropped_in_silence(transform, device, backend):
    query, key, value = _dense(device)
    kept = OPERATORS.forward(*fields(query, key, value), False, False, True, backend)

    def forward(x):
        return OPERATORS.forward(*fields(x, key, value), False, False, False, backend)[0].sum()

    def backward(x):
        incoming = kept[0], None, None, kept[0], kept[2], kept[3]
        return OPERATORS.backward(*incoming, *fields(x, key, value), backend, WANTED)[0].sum()

    for function in (forward, backward):
        with pytest.raises(NotImplementedError, match="jvp|torch.func"):
            if transform == "jvp":
                torch.func.jvp(function, (query,), (query,))
            else:
                torch.func.grad(function)(query)


@pytest.mark.parametrize("name", ["append", "decode"])
def test_what_has_no_derivative_says_so(name, device, backend):
    wanted = "new_key" if name == "append" else "query"
    given = moved(RIGHT[name] | dict(backend=backend), device)
    given[wanted] = given[wanted].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{wanted}: expected a tensor without a gradient"):
        operator(name)(**given)
    with torch.no_grad():
        operator(name)(**given)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="without a gradient"):
        operator(name)(**given | {wanted: forward_ad.make_dual(given[wanted].detach(), given[wanted].detach())})


def test_marks_have_no_gradient_and_want_none(device):
    given = moved(RIGHT["block_mask"], device)
    given["bias"] = given["bias"].clone().requires_grad_()
    assert not OPERATORS.block_mask(**given).requires_grad


@pytest.mark.parametrize("sizes", [(0, SK), (SQ, 0)], ids=["no queries", "no keys"])
def test_vmap_of_nothing(sizes, device):
    query, key, value = (torch.randn(3, 2, 2, n, 8, device=device) for n in (sizes[0], sizes[1], sizes[1]))

    def total(backend):
        def attend(query, key, value):
            return fa.attention(query, key, value, backend=backend)

        grad = torch.func.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))
        return torch.vmap(attend)(query, key, value), *torch.vmap(grad)(query, key, value)

    same(total("triton"), total("naive"))


def test_a_second_derivative_of_nothing_that_came_is_nothing(device, backend):
    """By name a backward may be asked for gradients without one that comes in."""
    query, key, value = leaves(*_dense(device))
    call = fields(query, key, value)
    with torch.no_grad():
        out, _, weights, stats = OPERATORS.forward(*call, False, False, True, backend)
    grads = OPERATORS.backward(None, None, None, out, weights, stats, *call, backend, WANTED)
    assert all((x == 0).all() for x in grads[:3])
    again = torch.autograd.grad(grads[0].sum(), (query, key, value), allow_unused=True)
    assert all(x is None or not x.any() for x in again)


@pytest.mark.parametrize(
    "dtype, width, columns, on_cpu",
    [
        *((torch.float32, 64, 2, 1), (torch.float16, 64, 18, 65), (torch.float64, 64, 2, 1)),
        (torch.bfloat16, 5, 4, 4 if multiplies_bfloat16() else 6),
    ],
)
def test_columns_that_a_forward_keeps(dtype, width, columns, on_cpu):
    from fusedattn.operators.attention import stats_columns

    assert stats_columns(dtype, width) == columns and stats_columns(dtype, width, "cpu") == on_cpu
    query, key = torch.randn(1, 2, 3, 8, dtype=dtype), torch.randn(1, 2, 3, width, dtype=dtype)
    *_, stats = OPERATORS.forward(*fields(query, query, key), False, False, True, "cpu")
    assert stats.shape == (1, 2, 3, on_cpu)


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_a_gradient_of_what_is_absent_is_named_where_a_derivative_is_wanted(backend):
    """Autograd takes such a call before the operator, whose check it would miss."""
    call = fields(*(torch.randn(1, 2, 4, 16) for _ in range(3)))
    out, _, weights, stats = OPERATORS.forward(*call, False, False, True, backend)
    for place, name in ((3, "bias"), (4, "alibi_slopes"), (5, "sinks")):
        need = [True, True, True, *(n == place for n in range(3, len(INPUTS)))]
        incoming = torch.ones_like(out).requires_grad_()
        with pytest.raises(ValueError, match=f"^need: expected False for {name}, which is None"):
            OPERATORS.backward(incoming, None, None, out, weights, stats, *call, backend, need)
