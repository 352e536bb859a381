"""torch.vmap of what is easily forgotten: no calls at all, sinks of packed sequences, caches that are written to."""

import pytest
import torch

import fusedattn as fa

from ..inside import same
from ..sequences import offsets

MODES = {
    "forward": lambda f: f,
    "gradient": lambda f: torch.func.grad(lambda *x: f(*x).square().sum(), argnums=(0, 1)),
    "tangent": lambda f: lambda *x: torch.func.jvp(f, x, x)[1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", ["triton", "cpu", "naive"])
def test_no_calls_have_results_of_the_right_shape(backend, packed, mode, device):
    device = "cpu" if backend == "cpu" else device
    cu = offsets((2, 3), device)

    def attend(query, key):
        if packed:
            return fa.attention_varlen(query, key, key, cu, cu, max_seqlen_q=3, max_seqlen_k=3, backend=backend)
        return fa.attention(query, key, key, backend=backend)

    one = torch.randn((5, 2, 16) if packed else (1, 2, 5, 16), device=device)
    none = one.expand(0, *one.shape)
    got, want = torch.vmap(MODES[mode](attend))(none, none), MODES[mode](attend)(one, one)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert [x.shape for x in got] == [(0, *x.shape) for x in want]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(
    ("backend", "lengths"),
    [("triton", (2, 3)), ("cpu", (2, 3)), ("naive", (2, 3)), ("naive", (1, 200, 2))],
)
def test_sinks_of_packed_sequences(backend, lengths, dims, mode, device):
    device = "cpu" if backend == "cpu" else device
    cu = offsets(lengths, device)

    def attend(query, sinks):
        return fa.attention_varlen(query, query, query, cu, cu, sinks=sinks, backend=backend)

    many = torch.randn(2, sum(lengths), 2, 16, device=device), torch.randn(2, 2, device=device)
    given = [x[0] if dim is None else x for x, dim in zip(many, dims, strict=True)]
    each = [[x if dim is None else x[n] for x, dim in zip(given, dims, strict=True)] for n in range(2)]
    got, want = torch.vmap(MODES[mode](attend), dims)(*given), [MODES[mode](attend)(*x) for x in each]
    if mode != "gradient":
        got, want = (got,), [(x,) for x in want]
    same(got, [torch.stack(x) for x in zip(*want, strict=True)], atol=2e-5)


def test_caches_that_are_written_to():
    """By the naive path: torch.vmap writes values elsewhere by indices that stand apart."""
    key, value, new = torch.randn(2, 2, 2, 8, 4), torch.randn(2, 2, 2, 8, 4), torch.randn(2, 2, 2, 1, 4)
    lengths = torch.tensor([3, 5], dtype=torch.int32)

    def attend(key, value, new):
        more = dict(new_key=new, new_value=new, backend="naive")
        return fa.attention_decode(new, key, value, cache_seqlens=lengths, **more)

    one_by_one = key.clone(), value.clone()
    want = torch.stack([attend(*x) for x in zip(*one_by_one, new, strict=True)])
    same([torch.vmap(attend)(key, value, new), key, value], [want, *one_by_one])
