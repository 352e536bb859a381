"""A model compiled ahead of time: by AOTInductor, into a package of machine code that calls the operators."""

import shutil

import pytest
import torch

import fusedattn as fa

from ..inside import same

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]


class Model(torch.nn.Module):
    """Dense and packed attention between projections."""

    def __init__(self, backend, device):
        super().__init__()
        self.attention = fa.MultiHeadAttention(32, 2, causal=True, backend=backend, device=device)
        self.backend = backend

    def forward(self, x, key_mask, cu_seqlens):
        x = self.attention(x, key_mask=key_mask)[0]
        rows = x.flatten(0, 1).unflatten(-1, (2, 16))
        longest = dict(max_seqlen_q=64, max_seqlen_k=64)
        return x, fa.attention_varlen(rows, rows, rows, cu_seqlens, cu_seqlens, **longest, backend=self.backend)


@pytest.fixture(params=["triton", None], ids=["triton", "no backend named"])
def backend(request, device):
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    return request.param


def packaged(program, folder):
    path = str(folder / "model.pt2")
    return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))


def test_a_package_gives_the_same_for_any_batch_and_length(backend, device, tmp_path):
    model, sizes = (
        Model(backend, device).eval(),
        [torch.export.Dim(name, min=2, max=64) for name in ("batch", "length")],
    )
    free = dict(enumerate(sizes))

    def draw(batch, length):
        key_mask = torch.arange(length, device=device) < torch.randint(1, length, (batch, 1), device=device)
        cu_seqlens = torch.tensor([0, length, batch * length], dtype=torch.int32, device=device)
        return torch.randn(batch, length, 32, device=device), key_mask, cu_seqlens

    with torch.no_grad():
        program = torch.export.export(model, draw(2, 10), dynamic_shapes=(free, free, None))
        assert sum("fusedattn.forward" in str(node.target) for node in program.graph.nodes) == 2
        loaded = packaged(program, tmp_path)
        for sizes in ((2, 10), (2, 17), (5, 12)):
            inputs = draw(*sizes)
            same(loaded(*inputs), model(*inputs))


class Step(torch.nn.Module):
    """A token of each sequence, by a cache."""

    def __init__(self, backend):
        super().__init__()
        self.backend = backend

    def forward(self, query, keys, values, lengths, new_key, new_value):
        new = dict(cache_seqlens=lengths, new_key=new_key, new_value=new_value)
        return fa.attention_decode(query, keys, values, **new, backend=self.backend)


def test_a_package_appends_to_a_cache(backend, device, tmp_path):
    shapes = (2, 4, 1, 16), (2, 2, 8, 16), (2, 2, 8, 16), (2,), (2, 2, 1, 16), (2, 2, 1, 16)

    def draw():
        drawn = [torch.randn(shape, device=device) for shape in shapes]
        return *drawn[:3], torch.tensor([1, 5], dtype=torch.int32, device=device), *drawn[4:]

    with torch.no_grad():
        loaded, inputs = packaged(torch.export.export(Step(backend), draw()), tmp_path), draw()
        others = [x.clone() for x in inputs]
        same([loaded(*inputs), *inputs], [Step(backend)(*others), *others])
