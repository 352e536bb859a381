"""Tests the build for Hugging Face's kernels: its contents, and loading it beside pip's copy."""

import importlib.metadata
import json
import runpy
from pathlib import Path

import pytest

from ..conftest import run_python

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / ".kernels"  # from `make .kernels`; not the folder `kernels` of the repository
WORKLOADS = {f"{name}.small" for name in ("FlashAttention", "FlashAttentionCausal", "FlashAttentionVarlen")}


def test_kernels_loads_it_beside_the_installed_copy(tmp_path):
    """The build loads beside the installed copy, has operator names of its own, and needs no network."""
    pytest.importorskip("triton", reason="one of the backends is Triton's")
    if not KERNELS.exists():
        try:
            importlib.metadata.version("kernels")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("Hugging Face's kernels is not installed: make .kernels")
    folder = tmp_path / "hub" / "fusedattn"
    runpy.run_path(str(ROOT / ".ci" / "hub.py"))["write"](folder)
    environment = dict(PYTHONPATH=str(KERNELS), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    printed = run_python(ROOT / "tests" / "release" / "hub.py", folder, ROOT, cwd=tmp_path, **environment)
    said = json.loads(printed.splitlines()[-1])
    built = json.loads((folder / "build" / "torch-cpu" / "metadata.json").read_text())
    assert said["id"] == built["id"] and set(said["ran"]) == WORKLOADS
