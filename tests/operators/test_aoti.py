"""Tests a model that AOTInductor compiles ahead of time, into a package that calls our operators."""

import functools
import shutil

import pytest
import torch

import fusedattn as fa

from ..inside import same

no_compiler = shutil.which("g++") is None and shutil.which("clang++") is None
pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]
pytestmark += [pytest.mark.skipif(no_compiler, reason="AOTInductor needs a C++ compiler")]

BACKENDS = "triton", None  # one package has both backends, because compiling takes most of the time


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        make = functools.partial(fa.MultiHeadAttention, 32, 2, causal=True, device=device)
        self.attention = torch.nn.ModuleList(make(backend=backend) for backend in BACKENDS)

    def forward(self, x, key_mask, cu_seqlens):
        longest, results = dict(max_seqlen_q=64, max_seqlen_k=64), []
        for attention in self.attention:
            x = attention(x, key_mask=key_mask)[0]
            rows = x.flatten(0, 1).unflatten(-1, (2, 16))
            packed = fa.attention_varlen(rows, rows, rows, cu_seqlens, cu_seqlens, **longest, backend=attention.backend)
            results += x, packed
        return results


def test_a_package_gives_the_same_for_any_batch_and_length(device, tmp_path):
    model = Model(device).eval()
    free = {dim: torch.export.Dim(name, min=2, max=64) for dim, name in enumerate(("batch", "length"))}

    def draw(batch, length):
        key_mask = torch.arange(length, device=device) < torch.randint(1, length, (batch, 1), device=device)
        cu_seqlens = torch.tensor([0, length, batch * length], dtype=torch.int32, device=device)
        return torch.randn(batch, length, 32, device=device), key_mask, cu_seqlens

    with torch.no_grad():
        program = torch.export.export(model, draw(2, 10), dynamic_shapes=(free, free, None))
        assert sum("fusedattn.forward" in str(node.target) for node in program.graph.nodes) == 2 * len(BACKENDS)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for sizes in ((2, 10), (2, 17), (5, 12)):
            inputs = draw(*sizes)
            same(loaded(*inputs), model(*inputs))
