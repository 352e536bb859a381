"""flash-attn's functions with gradients: signatures, values and layouts."""

import functools
import inspect
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

import fusedattn as fa
from fusedattn.compat import _flash, flash_attn as compat
from fusedattn.testing.tolerance import verdict

from ..close import assert_like
from ..inside import same
from ..sequences import offsets
from .flash import formula

OPTIONS = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
OPTIONS += "deterministic=False, return_attn_probs=False"
OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {OFFSETS}, {OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {OFFSETS}, {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


class Case(NamedTuple):
    name: str
    options: dict = {}
    Sq: int = 6
    Sk: int = 6
    H: int = 4
    Hkv: int = 4
    D: int = 8
    Dv: int = 8
    B: int = 2
    dtype: torch.dtype = torch.float32

    def draw(self, device="cpu"):
        """[q, k, v], which want gradients, and the options."""
        shapes = (self.Sq, self.H, self.D), (self.Sk, self.Hkv, self.D), (self.Sk, self.Hkv, self.Dv)
        tensors = [torch.randn(self.B, *s, device=device).to(self.dtype).requires_grad_() for s in shapes]
        options = dict(self.options)
        if "alibi_slopes" in options:
            options["alibi_slopes"] = torch.rand(options["alibi_slopes"], device=device)
        return tensors, options


GROUPED = dict(Hkv=2, D=10, Dv=6)
CASES = [
    Case("plain"),
    Case("float64", dict(causal=True), dtype=torch.float64, **GROUPED),
    Case("float16", dict(window_size=(2, 1)), dtype=torch.float16, **GROUPED),
    Case("bfloat16", dict(causal=True), dtype=torch.bfloat16, Hkv=1),
    Case("scale", dict(softmax_scale=-0.3), Sk=3),
    Case("causal, fewer keys", dict(causal=True), Sk=4, **GROUPED),
    Case("one query", dict(causal=True), Sq=1),
    Case("window, fewer keys", dict(window_size=(1, 1)), Sk=3),
    Case("window of one", dict(window_size=(0, 0)), Sk=7),
    Case("window to the left", dict(window_size=(1, -1)), Sk=7),
    Case("window to the right", dict(window_size=(-1, 1)), Sk=5),
    Case("wide window", dict(window_size=(99, 99)), Sk=9),
    Case("causal window", dict(causal=True, window_size=(2, 3)), Sk=8),
    Case("tensor as a window", dict(window_size=torch.tensor([1, 0]))),
    Case("array as a window", dict(window_size=np.array([1, 0], np.int32))),
    Case("alibi of each", dict(alibi_slopes=(2, 4), causal=True), Sk=4),
    Case(
        "everything",
        dict(softmax_scale=0.7, causal=True, window_size=(3, 1), softcap=2.0, alibi_slopes=(2, 4)),
        Sk=8,
        **GROUPED,
    ),
    Case("no queries", Sq=0),
    Case("no keys", dict(causal=True), Sk=0),
    Case("no batch", B=0),
]
ON_KERNELS = ("causal, fewer keys", "alibi of each", "everything", "float16", "no keys")


def differentiated(results, tensors):
    """{name: tensor} of (output, log-sum-exp) and gradients through both."""
    out, lse = results
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    loss = (out * weight.to(out.dtype)).sum() + lse.masked_fill(lse == -math.inf, 0.0).sum() / 3
    grads = torch.autograd.grad(loss, tensors, materialize_grads=True)
    return dict(zip(("out", "lse", "q", "k", "v"), (out, lse, *grads), strict=True))


def in_dtype(dtype, tensors, options):
    tensors = [x.detach().to(dtype).requires_grad_() for x in tensors]
    return tensors, {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def check(function, tensors, options):
    """function's results and gradients are as good as the formula in the dtype of the tensors."""
    out, lse, third = function(*tensors, **options, return_attn_probs=True)
    got = differentiated((out, lse), tensors)
    eager_tensors, eager_options = in_dtype(tensors[0].dtype, tensors, options)
    eager = differentiated(formula(*eager_tensors, **eager_options), eager_tensors)
    oracle_tensors, oracle_options = in_dtype(torch.float64, tensors, options)
    oracle = differentiated(formula(*oracle_tensors, **oracle_options), oracle_tensors)
    wrong = {name: held.why for name in got if not (held := verdict(got[name], eager[name], oracle[name])).ok}
    assert not wrong
    assert out.dtype == tensors[0].dtype and out.is_contiguous() and third.numel() == 0
    assert lse.dtype == torch.promote_types(out.dtype, torch.float32)
    assert torch.equal(function(*tensors, **options), out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case):
    check(compat.flash_attn_func, *case.draw())


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ON_KERNELS], ids=lambda case: case.name)
def test_kernels(case, device, poison):
    with fa.use_backend("triton"):
        check(compat.flash_attn_func, *case.draw(device))


def test_arguments_by_position():
    (q, k, v), slopes = CASES[0].draw()[0], torch.rand(4)
    out, lse, _ = compat.flash_attn_func(q, k, v, 0.0, 0.4, True, (2, 0), 3.0, slopes, True, True)
    options = dict(softmax_scale=0.4, causal=True, window_size=(2, 0), softcap=3.0, alibi_slopes=slopes)
    assert_like((out, lse), lambda: formula(q, k, v, **options))


def test_dropout():
    (q, k, v), options = Case("", Sq=40, Sk=50, Hkv=2).draw()[0], dict(softcap=2.0, causal=True)
    torch.manual_seed(5)
    want = fa.attention(*[x.transpose(1, 2) for x in (q, k, v)], dropout_p=0.4, **options).transpose(1, 2)
    torch.manual_seed(5)
    assert torch.equal(compat.flash_attn_func(q, k, v, 0.4, **options), want)
    assert not torch.equal(compat.flash_attn_func(q, k, v, 0.4, **options), want)


LAYOUTS = {
    "contiguous": lambda S, H: torch.randn(2, S, H, 8),
    "by head": lambda S, H: torch.randn(2, H, S, 8).transpose(1, 2),
    "packed": lambda S, H: torch.randn(2, S, 3, H, 8)[:, :, 1],
    "last is not first": lambda S, H: torch.randn(2, S, 8, H).mT,
    "expanded": lambda S, H: torch.randn(1, S, 1, 8).expand(2, S, H, 8),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_of_any_strides(name):
    q, k, v = LAYOUTS[name](5, 4), LAYOUTS[name](7, 2), LAYOUTS[name](7, 2)
    out = compat.flash_attn_func(q, k, v, causal=True)
    assert out.is_contiguous()
    assert_like(out, lambda: formula(q, k, v, causal=True)[0])


def together(function, packed, *rest):
    """Output, log-sum-exp and the gradient of each tensor in `packed`."""
    packed = [x.detach().requires_grad_() for x in packed]
    out, lse, _ = function(*packed, *rest, causal=True, softcap=2.0, return_attn_probs=True)
    assert out.is_contiguous()
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    loss = (out * weight).sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, packed)]


@pytest.mark.parametrize("varlen", [False, True])
def test_tensors_in_one(varlen):
    """queries, keys and values in one tensor, and keys and values in one."""
    if varlen:
        qkv, q, kv = (torch.randn(sum(n), *s, 8) for n, s in ((ROWS, (3, 4)), (ROWS, (4,)), (KEYS, (2, 2))))
        functions = [getattr(compat, f"flash_attn_varlen_{kind}func") for kind in ("qkvpacked_", "kvpacked_", "")]
        rows = offsets(ROWS), torch.tensor(max(ROWS))
        rests = rows, (rows[0], offsets(KEYS), rows[1], max(KEYS)), (rows[0], rows[0], *rows[1:] * 2)
    else:
        qkv, q, kv = (torch.randn(2, *s, 8) for s in ((5, 3, 4), (5, 4), (7, 2, 2)))
        functions = [getattr(compat, f"flash_attn_{kind}func") for kind in ("qkvpacked_", "kvpacked_", "")]
        rests = (), (), ()
    out, lse, grad = together(functions[0], [qkv], *rests[0])
    *want, dq, dk, dv = together(functions[2], qkv.unbind(-3), *rests[2])
    same((out, lse, grad), (*want, torch.stack([dq, dk, dv], -3)))
    out, lse, *grads = together(functions[1], [q, kv], *rests[1])
    *want, dq, dk, dv = together(functions[2], [q, *kv.unbind(-3)], *rests[1])
    same((out, lse, *grads), (*want, dq, torch.stack([dk, dv], -3)))


ROWS, KEYS = (3, 0, 5, 1, 2), (4, 2, 3, 0, 2)
VARLEN = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(1, 2)),
    "causal window": dict(causal=True, window_size=(1, 1), softcap=2.0, softmax_scale=0.5),
    "alibi": dict(alibi_slopes=torch.rand(4), causal=True),
    "alibi of each": dict(alibi_slopes=torch.rand(5, 4)),
}


def sequence_by_sequence(q, k, v, options):
    """Packed (output, log-sum-exp) of the formula for each sequence of ROWS and KEYS."""
    outs, lses = [], []
    split = (x.split(lengths) for x, lengths in ((q, ROWS), (k, KEYS), (v, KEYS)))
    for b, each in enumerate(zip(*split, strict=True)):
        slopes = options.get("alibi_slopes")
        own = options | ({} if slopes is None else dict(alibi_slopes=slopes[b] if slopes.dim() == 2 else slopes))
        out, lse = formula(*(x[None] for x in each), **own)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("name", VARLEN)
def test_sequences_of_unequal_lengths(name):
    """Some have no rows, some no keys; alignment, window and slopes are those of each."""
    check_varlen("cpu", VARLEN[name])


def test_sequences_on_kernels(device, poison):
    with fa.use_backend("triton"):
        check_varlen(device, {name: getattr(x, "to", lambda _, x=x: x)(device) for name, x in VARLEN["alibi"].items()})


def check_varlen(device, options):
    tensors = [
        torch.randn(sum(n), h, 8, device=device, requires_grad=True) for n, h in ((ROWS, 4), (KEYS, 2), (KEYS, 2))
    ]
    rest = offsets(ROWS, device), offsets(KEYS, device), max(ROWS), max(KEYS)
    out, lse, third = compat.flash_attn_varlen_func(*tensors, *rest, **options, return_attn_probs=True)
    assert out.is_contiguous() and lse.shape == (4, sum(ROWS)) and third.numel() == 0
    want = lambda: differentiated(sequence_by_sequence(*tensors, options), tensors)  # noqa: E731
    assert_like(differentiated((out, lse), tensors), want)
    assert torch.equal(compat.flash_attn_varlen_func(*tensors, *rest, **options), out)


def in_pages(page, *tensors):
    """(pools, table): the packed keys of each tensor in pages, in no order; what no sequence uses is NaN."""
    most = -(-max(KEYS) // page) + 1
    table = torch.randperm(len(KEYS) * most).view(len(KEYS), most)
    places = [torch.stack([own.repeat_interleave(page), torch.arange(page).repeat(most)])[:, :n]
              for own, n in zip(table, KEYS, strict=True)]  # fmt: skip
    pools = [x.new_full((table.numel(), page, *x.shape[1:]), math.nan) for x in tensors]
    return [pool.index_put(tuple(torch.cat(places, 1)), x) for pool, x in zip(pools, tensors, strict=True)], table.int()


@pytest.mark.parametrize("page", [3, 256])
@pytest.mark.parametrize("name", ["causal window", "alibi of each"])
@pytest.mark.parametrize("known", [True, False])
def test_packed_sequences_of_keys_in_pages(name, page, known, monkeypatch):
    """They are what packed keys give, gradients included; also where lengths are not read, as on a GPU."""
    tensors = [torch.randn(sum(n), h, 8, requires_grad=True) for n, h in ((ROWS, 4), (KEYS, 2), (KEYS, 2))]
    rest = offsets(ROWS), offsets(KEYS), max(ROWS), max(KEYS)
    want = compat.flash_attn_varlen_func(*tensors, *rest, **VARLEN[name], return_attn_probs=True)
    if not known:
        monkeypatch.setattr(_flash, "is_known", lambda x: False)
        monkeypatch.setattr("fusedattn.call.varlen.is_known", lambda x: False)
    pools, table = in_pages(page, *tensors[1:])
    found = compat.flash_attn_varlen_func(
        tensors[0], *pools, *rest, **VARLEN[name], return_attn_probs=True, block_table=table
    )
    same(found, want)
    same(*(differentiated(x[:2], tensors) for x in (found, want)))


@pytest.mark.parametrize(
    ("error", "name", "wrong"),
    [
        (ValueError, "block_table", torch.tensor([[0], [9]]).int()),
        (ValueError, "block_table", torch.tensor([[0]]).int()),
        (TypeError, "block_table", torch.tensor([[0], [1]])),
        (ValueError, "cu_seqlens_k", offsets([2, 5])),
        (ValueError, "cu_seqlens_k", offsets([3, -1])),
        (ValueError, "k", torch.zeros(4, 2, 8)),
        (ValueError, "v", torch.zeros(4, 3, 2, 8)),
    ],
)
def test_wrong_pages_of_packed_sequences_raise(error, name, wrong):
    pool = torch.zeros(4, 4, 2, 8)
    given = dict(q=torch.zeros(5, 4, 8), k=pool, v=pool, cu_seqlens_q=offsets([2, 3]), cu_seqlens_k=offsets([3, 4]))
    given |= dict(max_seqlen_q=3, max_seqlen_k=4, block_table=torch.tensor([[0], [1]]).int())
    compat.flash_attn_varlen_func(**given)
    with pytest.raises(error, match=f"^{name}: "):
        compat.flash_attn_varlen_func(**given | {name: wrong})


def test_deterministic_is_of_one_call(device):
    """Kept until its backward; and torch's own flag is as it was."""
    q, k, v = (torch.randn(1, 40, 2, 16, device=device, requires_grad=True) for _ in range(3))
    packed, offset = [x.detach()[0].requires_grad_() for x in (q, k, v)], offsets([15, 25], device)
    calls = (
        (functools.partial(compat.flash_attn_func, q, k, v), (q, k, v)),
        (functools.partial(compat.flash_attn_varlen_func, *packed, offset, offset, 25, 25), packed),
    )
    with fa.use_backend("triton"):
        for call, inputs in calls:
            outs = [call(deterministic=wanted) for wanted in (True, False, True)]
            grads = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
            same(grads[0], grads[2])
            close = [torch.allclose(x, y, atol=1e-4) for x, y in zip(*grads[:2], strict=True)]
            assert all(close) and (device != "cpu" or not all(map(torch.equal, *grads[:2])))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_backend_that_is_named_runs_or_raises():
    q, offset = torch.randn(1, 3, 2, 8), offsets([3])
    with fa.use_backend("hopper"):
        for call in (
            lambda: compat.flash_attn_func(q, q, q),
            lambda: compat.flash_attn_varlen_func(q[0], q[0], q[0], offset, offset, 3, 3),
            lambda: compat.flash_attn_with_kvcache(q, q, q),
        ):
            with pytest.raises(NotImplementedError, match="^backend: 'hopper'"):
                call()


def test_in_one_graph():
    q, k, v = CASES[0].draw()[0]
    options = dict(causal=True, window_size=(2, 0), softcap=2.0, deterministic=True, return_attn_probs=True)
    want = compat.flash_attn_func(q, k, v, **options)
    got = torch.compile(compat.flash_attn_func, fullgraph=True, backend="eager")(q, k, v, **options)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_leaves_half_precision_as_it_is(dtype, other):
    q, k, v = (torch.randn(2, 5, 2, 8).to(dtype) for _ in range(3))
    cos = torch.randn(9, 4)
    calls = (
        lambda: compat.flash_attn_func(q, k, v),
        lambda: compat.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *[offsets([5, 5])] * 2, 5, 5),
        lambda: compat.flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=4),
        lambda: compat.flash_attn_with_kvcache(q, k.clone(), v.clone(), k[:, :1], v[:, :1], cos, cos, cache_seqlens=4),
    )
    for call in calls:
        want = call()
        with torch.autocast("cpu", other):
            got = call()
        assert got.dtype == dtype and torch.equal(got, want)
