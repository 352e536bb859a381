"""Loads the build for Hugging Face's kernels in a process of its own, by their package, beside pip's copy of ours.

    python hub.py FOLDER ROOT      the build, and the repository, whose copy stands for pip's

Run from elsewhere, for the repository has a folder `kernels` that is another one.
"""

import contextlib
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import torch
from kernels._rust import Digest, DigestAlgorithm, Metadata
from torch.overrides import TorchFunctionMode

import kernels

FOLDER, ROOT = map(Path, sys.argv[1:])


def suite():
    """kernels.cli.benchmark by itself: the commands beside it want packages for signatures, of which there are none."""
    spec = importlib.util.spec_from_file_location("suite", Path(kernels.__file__).parent / "cli" / "benchmark.py")
    sys.modules["suite"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OnCpu(TorchFunctionMode):
    """Tensors that ask for a GPU are made on the CPU: the suite's own workloads of attention name one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def no_network(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"{event} {arguments}")


def call(fa, backend, double=False):
    """Output and gradients of one call by the copy of a backend, and of a packed one."""
    torch.manual_seed(0)
    dtype = torch.float64 if double else torch.float32
    query, key, value = (torch.randn(1, heads, 37, 16).to(dtype).requires_grad_() for heads in (4, 2, 2))
    real = torch.arange(37)[None] < 30
    out = fa.attention(query, key, value, causal=True, key_mask=real, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    packed = [x.detach()[0].transpose(0, 1) for x in (query, key, value)]
    offsets = torch.tensor([0, 11, 37], dtype=torch.int32)
    return out.detach(), *grads, fa.attention_varlen(*packed, offsets, offsets, causal=True, backend=backend)


def metadata_fits():
    """Both builds: what is written of them is true, and kernels would take them."""
    for backend in ("cpu", "cuda"):
        variant = FOLDER / "build" / f"torch-{backend}"
        read = Metadata.read_from_file(variant / "metadata.json")
        read.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert str(read.backend.backend_type).lower() == backend, read
        assert read.id.startswith(f"_fusedattn_{backend}_") and read.id.isidentifier()


def copies_agree(hub, own):
    worst = 0.0
    for backend in ("naive", "cpu", "triton"):
        if backend == "triton" and not own.explain(*torch.zeros(3, 1, 1, 4, 16), backend="triton").backend:
            continue
        ours, theirs, true = call(own, backend), call(hub, backend), call(own, "naive", double=True)
        assert all(map(torch.equal, ours, theirs)), backend
        worst = max(worst, *((one - exact).abs().max().item() for one, exact in zip(theirs, true, strict=True)))
    assert worst < 1e-4, worst
    return worst


def benchmarks_run():
    """Each workload of ours, and the small ones of the suite, which verifies what they return."""
    run, ran = suite(), []
    (script,) = run.discover_benchmark_scripts("fusedattn", FOLDER)
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True  # so the suite's own are there
    classes = run.discover_benchmark_classes(script, FOLDER)
    torch.cuda.is_available = available
    for one in classes:
        if one.__name__ != "Attention":
            one.benchmark_medium = one.benchmark_large = None
        with contextlib.redirect_stderr(sys.stdout), OnCpu():
            results, _ = run.run_benchmark_class(one, 1, 0, str(FOLDER), True, "local")
        assert all(timed.verified for timed in results.values())
        ran += [f"{one.__name__}.{workload}" for workload in results]
    return ran


def main():
    warnings.simplefilter("ignore")
    sys.addaudithook(no_network)
    metadata_fits()
    hub = kernels.get_local_kernel(FOLDER)
    assert Path(hub.__file__).is_relative_to(FOLDER)
    assert "fusedattn" not in sys.modules, "the build needs no other copy"
    if importlib.util.find_spec("triton"):
        tuned = importlib.import_module(f"{hub.__name__}.launch.tuned")
        gpu = types.SimpleNamespace(name="", major=9, minor=0)
        with mock.patch("torch.cuda.get_device_properties", lambda device: gpu):
            assert tuned.about(None)["fusedattn"] == hub.__version__, "a tuning file names the copy that it is for"
    sys.path.append(str(ROOT))
    import fusedattn as own

    assert not Path(own.__file__).is_relative_to(FOLDER)
    worst = copies_agree(hub, own)
    operators = getattr(torch.ops, hub.__name__)
    assert operators.forward is not torch.ops.fusedattn.forward
    print(json.dumps(dict(id=hub.__name__, worst=worst, ran=benchmarks_run())))


if __name__ == "__main__":
    main()
