"""Loads the build for Hugging Face's package `kernels` by that package, beside another copy of fusedattn.

    python hub.py FOLDER ROOT      FOLDER: the build; ROOT: the repository, which stands for an installed copy

Run it from elsewhere: the repository has another folder `kernels`.
"""

import contextlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path

import torch
from kernels._rust import Digest, DigestAlgorithm, Metadata
from torch.overrides import TorchFunctionMode

import kernels

FOLDER, ROOT = map(Path, sys.argv[1:])


def suite():
    """Import kernels.cli.benchmark alone, because its package needs packages that are not installed."""
    spec = importlib.util.spec_from_file_location("suite", Path(kernels.__file__).parent / "cli" / "benchmark.py")
    sys.modules["suite"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class OnCpu(TorchFunctionMode):
    """Function mode that creates tensors on the CPU if a GPU is asked for, as the benchmark workloads do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def no_network(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"{event} {arguments}")


def metadata_fits():
    for backend in ("cpu", "cuda"):
        variant = FOLDER / "build" / f"torch-{backend}"
        read = Metadata.read_from_file(variant / "metadata.json")
        read.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert str(read.backend.backend_type).lower() == backend, read
        assert read.id.startswith(f"_fusedattn_{backend}_") and read.id.isidentifier()


def benchmarks_run():
    run, ran = suite(), []
    (script,) = run.discover_benchmark_scripts("fusedattn", FOLDER)
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True  # otherwise the suite finds no classes
    classes = run.discover_benchmark_classes(script, FOLDER)
    torch.cuda.is_available = available
    for one in classes:
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
    sys.path.append(str(ROOT))
    import fusedattn as own

    assert not Path(own.__file__).is_relative_to(FOLDER)
    operators = getattr(torch.ops, hub.__name__)
    assert operators.forward is not torch.ops.fusedattn.forward
    print(json.dumps(dict(id=hub.__name__, ran=benchmarks_run())))


if __name__ == "__main__":
    main()
