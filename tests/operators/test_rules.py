"""Tests that operators called by name are as safe as the functions: wrong arguments raise before a launch."""

import contextlib
import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fusedattn as fa
from fusedattn.call.options import AssumedGPU, Call, override
from fusedattn.dispatch import backends

from ..guard import Guard
from ..inside import fields, leaves, leaves_of, same
from ..mistakes import assert_named, bools, ints, of_shapes, of_types, of_values, ones, wrong
from ..sequences import offsets

OPERATORS = torch.ops.fusedattn
B, HQ, HKV, SQ, SK, D, DV, TQ, TK = 2, 4, 2, 3, 5, 8, 6, 7, 9

LONGEST = dict(max_seqlen_q=4, max_seqlen_k=4)
OFFSETS = dict(cu_seqlens_q=offsets((3, 0, 4)), cu_seqlens_k=offsets((2, 3, 4)))
HEADS = dict(alibi_slopes=ones(1, HQ), sinks=ones(1, HQ))
AFTER = dict(need_lse=True, need_weights=False, save=True, backend="triton")
DENSE = fields(ones(B, HQ, SQ, D), ones(B, HKV, SK, D), ones(B, HKV, SK, DV))._asdict()
MASKS = dict(mask=bools(B, 1, SQ, SK), key_mask=bools(1, SK), query_mask=bools(B, SQ), bias=ones(1, HQ, 1, SK))
NOISE = dict(dropout_p=0.5, seed=torch.ones(1).long())
ALL = DENSE | MASKS | HEADS | NOISE | dict(block_mask=ones(B, 1, 1, 1).to(torch.int32))
PACKED = fields(ones(1, HQ, TQ, D), ones(1, HKV, TK, D), ones(1, HKV, TK, DV))._asdict() | OFFSETS
PACKED_MASKS = dict(mask=bools(3, 1, 4, 4), key_mask=bools(1, TK), query_mask=bools(1, TQ), bias=ones(1, HQ, 4, 4))
INCOMING = dict(grad_out=ones(B, HQ, SQ, DV), grad_lse=ones(B, HQ, SQ), grad_weights=ones(B, HQ, SQ, SK))
KEPT = dict(out=ones(B, HQ, SQ, DV), weights=ones(B, HQ, SQ, SK), stats=ones(B, HQ, SQ, 2))
GIVEN = {f"tangent_{name}": ones(*DENSE[name].shape) for name in ("query", "key", "value")}
GIVEN |= dict.fromkeys(("tangent_bias", "tangent_alibi_slopes", "tangent_sinks"))
CACHES = dict(key_cache=ones(3, HKV, 4, D), value_cache=ones(3, HKV, 4, DV), cache_seqlens=ints(2, 5))
CACHES |= dict(block_table=ints((0, 1), (2, 2)))
TURNING = dict(rotary_cos=ones(7, 2), rotary_sin=ones(7, 2), rotary_interleaved=False)
ON = dict(named=True, backend="triton")
NUMBERS = dict(left=None, right=None, top_left=False, scale=0.5, softcap=None, need_lse=True) | ON
OF_CACHES = dict(mask=bools(1, 1, SQ, 8), key_mask=bools(B, 8), query_mask=bools(B, SQ), bias=ones(1, HQ, SQ, 8))
WANTED = [True, True, True, False, False, False]  # gradients of query, key and value
RIGHT = {  # valid arguments of each operator
    "forward": ALL | AFTER,
    "packed forward": PACKED | PACKED_MASKS | HEADS | LONGEST | AFTER,
    "backward": INCOMING | KEPT | DENSE | dict(backend="triton", need=WANTED),
    "tangent": GIVEN | dict(out=KEPT["out"], stats=KEPT["stats"]) | DENSE | dict(need_weights=False, backend="triton"),
    "append": CACHES | dict(new_key=ones(B, HKV, 1, D), new_value=ones(B, HKV, 1, DV)) | TURNING | ON,
    "decode": dict(query=ones(B, HQ, SQ, D)) | CACHES | dict(added=1) | TURNING | OF_CACHES | HEADS | NUMBERS,
}
SHAPES = {
    "forward": dict(
        query=[(SQ, D)], key=[(SK, D), (1, HKV, SK, D), (B, HKV, SK, D + 1)], value=[(D,), (B, HKV, SK - 1, DV)],
        mask=[(SQ, SK), (B, HQ, SQ, SK + 1)], bias=[(SQ, SK), (B, HKV, SQ, SK)], key_mask=[(SK,), (1, SQ)],
        query_mask=[(3, SQ), (SQ,)], alibi_slopes=[(HQ,), (3, HQ)], sinks=[(3, HQ), (HKV,)], seed=[(2,)],
        block_mask=[(1, 1, 1, 2), (1, 1, 1)],
    ),
    "packed forward": dict(
        cu_seqlens_q=[(0,), (1, 4)], cu_seqlens_k=[(2,)], key_mask=[(1, TK - 1)],
        query_mask=[(1, TQ + 1)], bias=[(2, HQ, 4, 4)], alibi_slopes=[(2, HQ)],
    ),
    "backward": dict(
        key=[(SK, D), (1, HKV, SK, D)], grad_out=[(B, HQ, SQ, DV - 1)], grad_lse=[(B, HQ, SK)],
        grad_weights=[(B, HQ, SQ, 1)], out=[(B, HQ, 1, DV)], weights=[(0,)], stats=[(0,), (B, HQ, SQ, 3)],
    ),
    "tangent": dict(key=[(SK, D)], tangent_key=[(B, HKV, SK, 1)], out=[(B, HQ, SQ, 1)], stats=[(0,), (B, HQ, SQ, 3)]),
    "append": dict(
        key_cache=[(HKV, 4, D), (3, HKV, 4, 0)], value_cache=[(3, HKV, 5, DV)], cache_seqlens=[(B, 1)],
        block_table=[(1, 2)], new_key=[(B, 1, 1, D), (B, HKV, 1, D + 1)], new_value=[(B, HKV, 2, DV)],
        rotary_cos=[(7, 5)], rotary_sin=[(6, 2)],
    ),
    "decode": dict(
        query=[(HQ, SQ, D)], cache_seqlens=[(3,)], block_table=[(2,)], rotary_sin=[(1, 2)], key_mask=[(B, 4)],
        mask=[(1, 1, SQ, 9)], sinks=[(HQ,)],
    ),
}  # fmt: skip
BACKEND = dict(backend=["other", ""])
WRONG = {
    "forward": of_values(
        dict(left=[-1], right=[-2], scale=[float("nan")], softcap=[0.0], dropout_p=[1.5], seed=[None]) | BACKEND
    ) + [
        wrong("backend", backend="hopper", named=True), wrong("query", **OFFSETS), wrong("origin", origin=[-1] * 5),
        wrong("mask_bits", mask_bits=fa.plan(bools(1, 1)).mask_bits.mT.contiguous().mT),
        wrong("need_weights", need_weights=True, partial=True, **{x: DENSE[x].half() for x in [*DENSE][:3]}),
    ],
    "packed forward": of_values(dict.fromkeys(OFFSETS, [None]), TypeError) + [
        *of_values(dict(max_seqlen_q=[-1, None], max_seqlen_k=[-1, None])), wrong("query", **DENSE | OFFSETS),
        wrong("cu_seqlens_q", cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)),
    ],
    "backward": of_values(dict(need=[[True] * len(WANTED), [True] * 3]) | BACKEND),
    "tangent": of_values(dict(tangent_bias=[ones(1, 1, SQ, SK)], partial=[True]) | BACKEND),
    "append": of_values(dict(backend=["eager"], rotary_sin=[None])) + [wrong("key_cache", block_table=None)],
    "decode": of_values(dict(backend=["eager"], added=[-1], left=[-1])) + [
        wrong("key_cache", key_cache=ones(3, 3, 4, D), value_cache=ones(3, 3, 4, DV))
    ],
}  # fmt: skip


def moved(arguments, device):
    """Return arguments with CPU tensors moved to a device; meta tensors stay."""
    return {name: x.to(device) if getattr(x, "is_cpu", False) else x for name, x in arguments.items()}


def operator(name):
    return getattr(OPERATORS, name.removeprefix("packed "))


def absent(name):
    tensors = [x.name for x in operator(name).default._schema.arguments if str(x.type) == "Tensor"]
    return of_values({x: [None] for x in tensors}, TypeError)


def rows_of(name):
    return WRONG[name] + absent(name) + of_types(RIGHT[name], by_name=True) + of_shapes(RIGHT[name], SHAPES[name])


@pytest.mark.parametrize("name", RIGHT)
def test_a_wrong_argument_is_named_before_a_launch(name, device, launched):
    operator(name)(**moved(RIGHT[name], device))
    launched.clear()
    for argument, error, changed in rows_of(name):
        assert_named(operator(name), moved(RIGHT[name], device), (argument, error, moved(changed, device)))
        if not any(isinstance(x, torch.Tensor) and x.is_meta for x in changed.values()):
            assert_named(operator(name), moved(RIGHT[name], "meta"), (argument, error, moved(changed, "meta")))
    assert not launched


RIGHT_ON_CPU = {name: RIGHT[name] | dict(backend="cpu") for name in ("packed forward", "append", "decode")}
RIGHT_ON_CPU["forward"] = DENSE | MASKS | HEADS | AFTER | dict(backend="cpu")
RIGHT_ON_CPU["backward"] = RIGHT["backward"] | dict(grad_weights=None, stats=ones(B, HQ, SQ, 1), backend="cpu")
WRONG_ON_CPU = {
    "forward": [wrong("backend", softcap=2.0), wrong("backend", **NOISE), wrong("backend", **moved(ALL, "meta"))],
    "packed forward": [wrong("backend", softcap=2.0), wrong("max_seqlen_k", max_seqlen_k=None)],
    "backward": [wrong("backend", **NOISE), wrong("stats", stats=KEPT["stats"])],
    "append": [wrong("new_key", new_key=ones(B, 1, 1, D))],
    "decode": [wrong("backend", softcap=2.0), wrong("query", query=ones(HQ, SQ, D))],
}


@pytest.mark.parametrize("name", WRONG_ON_CPU)
def test_a_wrong_argument_is_named_on_a_cpu(name):
    operator(name)(**RIGHT_ON_CPU[name])
    for row in WRONG_ON_CPU[name]:
        assert_named(operator(name), RIGHT_ON_CPU[name], row)


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


@pytest.mark.parametrize("name", RIGHT)
def test_a_wrong_argument_is_named_where_a_gradient_is_asked(name, device):
    """Errors name a wrong argument also if inputs need gradients; autograd sees it first, and must not crash."""
    for argument, error, changed in rows_of(name) if "ward" in name else absent(name):
        given = moved(RIGHT[name] | changed, device)
        given = dict(zip(given, leaves_of(given.values()), strict=True))
        assert_named(operator(name), given, (argument, error, {}))


def packed_on_cpu(inputs, offsets, most, need_weights, options):
    """Return the results of a forward and a backward of packed sequences, for the backend "cpu"."""
    cu_seqlens = {name: ints(*x) for name, x in zip(OFFSETS, offsets, strict=True)}
    call = fields(*inputs, **cu_seqlens, **dict(zip(LONGEST, most, strict=True)), **options)
    out, lse, weights, stats = kept = OPERATORS.forward(*call, True, need_weights, True, "cpu")
    incoming = out.cos(), lse.nan_to_num(0, 0, 0).cos(), None
    return *kept, *OPERATORS.backward(*incoming, out, weights, stats, *call, "cpu", WANTED)


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("offsets", HOSTILE.values(), ids=HOSTILE)
def test_wrong_offsets_read_and_write_nothing_outside_on_a_cpu(offsets, hiding):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        shapes = (TQ, HQ, D), (TK, HKV, D), (TK, HKV, DV)
        guard, options = Guard(), HIDING[hiding](TQ, TK)
        inputs = [guard.inside(torch.randn(shape).to(dtype)).transpose(0, 1)[None] for shape in shapes]
        got = packed_on_cpu(inputs, offsets, (TQ, TK), True, options)
        assert not any(x.isnan().any() for x in got)
        inside = [[min(max(x, 0), n) for x in each] for each, n in zip(offsets, (TQ, TK), strict=True)]
        same(got, packed_on_cpu(inputs, inside, (TQ, TK), True, options))
        for most in ((4, 4), (1, 4), (0, 3), (3, 0)) if hiding in ("plain", "mask", "bias") else ():
            with contextlib.suppress(RuntimeError):  # a sequence is longer than the given maximum
                got = packed_on_cpu(inputs, offsets, most, True, HIDING[hiding](*most))
                assert not any(x.isnan().any() for x in got)
        guard.check()


def drawn(device):
    return [torch.randn(DENSE[name].shape, device=device) for name in ("query", "key", "value")]


@pytest.mark.filterwarnings("ignore")
def test_a_program_exported_without_gradients_has_them_on_any_device(device, monkeypatch):
    class Block(torch.nn.Module):
        def forward(self, query, key, value, cu_q, cu_k):
            dense, packed = (query, key, value), [x.flatten(0, 1) for x in (query, key, value)]
            caches, new = [x.detach().clone() for x in dense[1:]], query.detach()[:, :, :1]
            decoded = fa.attention_decode(new, *caches, cache_seqlens=cu_q[:2], new_key=new, new_value=new, softcap=5.0)
            outs = fa.attention(*dense, causal=True), fa.attention(*dense, dropout_p=0.3, seed=5)
            return *outs, fa.attention_varlen(*packed, cu_q, cu_k, **LONGEST), decoded

    inputs, rows = leaves(*(torch.randn(2, 3, 4, 8, device=device) for _ in range(3))), offsets((3, 2, 1), device)
    with torch.no_grad(), override(gpu=AssumedGPU(80)):
        program = torch.export.export(Block(), (*inputs, rows, rows), strict=True)
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    for backend in ("triton", None) if device == "cpu" else ("triton",):
        with fa.use_backend(backend):
            results = [function(*inputs, rows, rows) for function in (loaded, Block())]
            same(*results)
            same(*(torch.autograd.grad(sum(x.square().sum() for x in outs), inputs) for outs in results))
        monkeypatch.setattr(backends, "machine_reasons", lambda device: ("no GPU",))  # nor Triton's interpreter
    with pytest.raises(NotImplementedError, match="'triton' cannot take this call: no GPU"):
        OPERATORS.forward(*fields(*drawn("cpu"), named=True), False, False, False, "triton")
    with FakeTensorMode():
        assert OPERATORS.forward(*fields(*drawn("cuda")), False, False, False, "cpu")[0].device.type == "cuda"
        assert backends._backend_here(Call(*drawn("cuda")), "cpu", True) == "naive"  # a program with caches


@pytest.mark.parametrize("transform", [lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.grad(f)(x)])
def test_a_tangent_is_not_dropped_in_silence(transform, device, backend):
    query, key, value = drawn(device)
    out, _, weights, stats = OPERATORS.forward(*fields(query, key, value), False, False, True, backend)

    def forward(x):
        return OPERATORS.forward(*fields(x, key, value), False, False, False, backend)[0].sum()

    def backward(x):
        dq, *_ = OPERATORS.backward(out, None, None, out, weights, stats, *fields(x, key, value), backend, WANTED)
        return dq.sum()

    for function in (forward, backward):
        with pytest.raises(NotImplementedError, match="jvp|torch.func"):
            transform(function, query)


@pytest.mark.parametrize("name, argument", [("append", "new_key"), ("decode", "query")])
def test_what_has_no_derivative_says_so(name, argument, device, backend):
    given = moved(RIGHT[name] | dict(backend=backend), device)
    learned = {argument: given[argument].clone().requires_grad_()}
    assert_named(operator(name), given, wrong(argument, **learned))
    with torch.no_grad():
        operator(name)(**given | learned)
    with forward_ad.dual_level():
        dual = {argument: forward_ad.make_dual(given[argument], given[argument].clone())}
        assert_named(operator(name), given, wrong(argument, **dual))


@pytest.mark.parametrize("options", [{}, dict(dropout_p=0.5, seed=3)], ids=["plain", "dropout"])
@pytest.mark.one_in(2)
def test_derivatives_by_name(options, device, backend):
    """Operators called by name have derivatives, even if the forward saved nothing, or no gradient comes in."""
    if backend == "cpu" and options:
        pytest.skip("it knows no dropout")
    inputs = leaves(*drawn(device))
    call = fields(*inputs, right=0, **options | (dict(seed=torch.tensor([3], device=device)) if options else {}))
    out, *_ = OPERATORS.forward(*call, False, False, False, backend)
    want = fa.attention(*inputs, causal=True, scale=0.25, **options, backend=backend)
    first, expected = (torch.autograd.grad(x.square().sum(), inputs, create_graph=True) for x in (out, want))
    same(first, expected)
    same(*[torch.autograd.grad(sum(x.square().sum() for x in grads), inputs) for grads in (first, expected)])
    with torch.no_grad():
        out, _, weights, stats = OPERATORS.forward(*call, False, False, True, backend)
    grads = OPERATORS.backward(None, None, None, out, weights, stats, *call, backend, WANTED)
    again = torch.autograd.grad(grads[0].sum(), inputs, allow_unused=True)
    assert not any(x is not None and x.any() for x in (*grads[:3], *again))


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_a_gradient_of_what_is_absent_is_named_where_a_derivative_is_wanted(backend):
    """Asking for the gradient of an absent option raises for `need`, also if the backward is differentiated."""
    call = fields(*drawn("cpu"))
    out, _, weights, stats = OPERATORS.forward(*call, False, False, True, backend)
    incoming = torch.ones_like(out).requires_grad_()
    for place in (3, 4, 5):
        need = [n < 3 or n == place for n in range(len(WANTED))]
        with pytest.raises(ValueError, match="^need: expected "):
            OPERATORS.backward(incoming, None, None, out, weights, stats, *call, backend, need)
