"""Tests two copies of the package in one process: the installed copy, and a copy inside another package."""

import shutil
from pathlib import Path

import pytest

from ..conftest import run_python

ROOT = Path(__file__).parents[2]

PROGRAM = """
import warnings

import torch

import fusedattn as own
from mypkg._vendor import fusedattn as copy

assert copy.__file__ != own.__file__
with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    def run(fa, backend, compiled=False):
        softcap = None if backend == "cpu" else 2.0
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
        mask = torch.ones(5, 5, dtype=torch.bool).tril(1)

        def attend(query, key, value):
            return fa.attention(query, key, value, mask=mask, softcap=softcap, backend=backend)

        if compiled:
            attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
        out = attend(query, key, value)
        grads = torch.autograd.grad(out.square().sum(), (query, key, value))
        query, key, value = (x.detach().clone() for x in (query, key, value))
        decoded = fa.attention_decode(
            query, key, value, cache_seqlens=torch.tensor([3], dtype=torch.int32), backend=backend
        )
        return out, *grads, decoded

    for backend in ("naive", "triton", "cpu"):
        want = run(own, backend)
        assert all(map(torch.equal, run(copy, backend), want))
        if backend != "naive":
            assert all(map(torch.equal, run(copy, backend, compiled=True), want))

assert torch.ops.fusedattn.forward is not torch.ops.mypkg__vendor_fusedattn.forward
own.compat.torch.register()
copy.compat.torch.register()
assert {"fusedattn", "mypkg__vendor_fusedattn"} <= set(torch.nn.attention.list_flash_attention_impls())

# There is one `flash_attn`: the second copy raises.
own.compat.flash_attn.install()
own.compat.flash_attn.install()
try:
    copy.compat.flash_attn.install()
except RuntimeError as error:
    print("refused:", error)
"""


@pytest.mark.matrix
def test_a_copy_in_another_package_works_beside_the_installed_one(tmp_path):
    pytest.importorskip("triton", reason="kernels need Triton")
    vendored = tmp_path / "mypkg" / "_vendor" / "fusedattn"
    ignore = shutil.ignore_patterns("__pycache__", "cli")
    shutil.copytree(ROOT / "fusedattn", vendored, ignore=ignore)
    shutil.copytree(ROOT / "kernels", vendored / "kernels", ignore=ignore)
    printed = run_python("-c", PROGRAM, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(tmp_path))
    assert printed.startswith("refused: install: ")
