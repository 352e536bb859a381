"""Where kernels run: in Triton's interpreter on the CPU, or on the GPU; and NaN in whatever they are to fill."""

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _call_device_function_at_once(self, *args, **kwargs):
    """`InterpretedFunction.__call__` without what it does again at every call, two fifths of its time.

    It patches the language for the interpreter. For a function of ours the launch has done so; for one of Triton's own
    the first call does, and it stays.
    """
    from triton.runtime import interpreter

    if self.fn.__module__ not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


_patched: set[str] = set()
if INTERPRETED and importlib.util.find_spec("triton"):
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.__call__ = _call_device_function_at_once


def pytest_generate_tests(metafunc):
    """A test that takes `device` runs its kernels in the interpreter, and again on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def device(request):
    pytest.importorskip("triton", reason="kernels need Triton")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels need TRITON_INTERPRET=1")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a GPU, and TRITON_INTERPRET unset")
    return request.param


@pytest.fixture
def poison(monkeypatch):
    """Whatever the package allocates is NaN: an element that no kernel writes then fails every comparison."""
    new_empty = torch.Tensor.new_empty

    def new_nan(self, *shape, **options):
        made = new_empty(self, *shape, **options)
        return made.fill_(float("nan")) if made.dtype.is_floating_point else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
