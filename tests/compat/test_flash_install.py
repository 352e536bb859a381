"""Tests `import flash_attn` after install(), and the padding functions of flash-attn."""

import importlib.util
import sys
import types

import pytest
import torch

from fusedattn.compat import flash_attn as compat

from ..conftest import run_python

INSTALL = """
import importlib.metadata, importlib.util, os, sys
import fusedattn
assert not [name for name in sys.modules if name.startswith("flash_attn")]
fusedattn.compat.flash_attn.install()
first = sys.modules["flash_attn"]
fusedattn.compat.flash_attn.install()
import flash_attn, flash_attn.bert_padding, flash_attn.flash_attn_interface as interface
from flash_attn import *
assert first is flash_attn and flash_attn.flash_attn_func is flash_attn_func
ours = vars(fusedattn.compat.flash_attn)
functions = [name for name in ours if name.startswith("flash_attn_")]
assert len(functions) == 7
assert all(getattr(flash_attn, name) is getattr(interface, name) is ours[name] for name in functions)
assert os.path.isdir(os.path.dirname(flash_attn.__file__)) and os.path.isfile(interface.__file__)
assert {importlib.util.find_spec(name).name for name in sys.modules if name.startswith("flash_attn")} == {
    "flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface"}
assert flash_attn.__version__.startswith("2.8.") and flash_attn.__version__.endswith("+fusedattn")
for looks in (lambda: importlib.metadata.version("flash_attn"), lambda: importlib.import_module("flash_attn.layers")):
    try:
        looks()
    except ImportError:  # PackageNotFoundError, too
        continue
    sys.exit(1)
"""


def test_install():
    run_python("-c", INSTALL)


@pytest.fixture
def without_flash_attn(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    yield
    for name in compat._MODULES:
        sys.modules.pop(name, None)


def test_install_refuses_where_the_real_one_is(without_flash_attn, monkeypatch, tmp_path):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.8.3'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"^install: .*flash_attn/__init__.py"):
        compat.install()
    assert "flash_attn" not in sys.modules
    monkeypatch.undo()
    real = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    with pytest.raises(RuntimeError, match="^install: .*imported flash_attn"):
        compat.install()
    assert sys.modules["flash_attn"] is real and "flash_attn.bert_padding" not in sys.modules


def test_padding():
    padding = compat._MODULES["flash_attn.bert_padding"]
    lengths, x = torch.tensor([3, 0, 4]), torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = (torch.arange(5) < lengths[:, None]).int()
    packed, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask)
    assert torch.equal(packed, torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)]))
    assert cu_seqlens.tolist() == [0, 3, 3, 7] and cu_seqlens.dtype == used.dtype == torch.int32
    assert longest == 4 and type(longest) is int and used.tolist() == [3, 0, 4]
    assert torch.equal(indices, mask.flatten().nonzero().flatten())
    padded = padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    (grad,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(grad, mask[..., None, None].expand_as(x).float())
    # unused tokens are kept, and counted separately
    kept = torch.zeros(3, 5, dtype=torch.bool)
    kept[1, :2] = kept[2, 4] = True
    packed, _, cu_seqlens, longest, used = padding.unpad_input(x, mask.bool(), kept)
    assert cu_seqlens.tolist() == [0, 3, 5, 10] and longest == 5 and used.tolist() == [3, 0, 4] and len(packed) == 10
    assert torch.equal(padding.index_first_axis(x, torch.tensor([2, 0])), x[[2, 0]])
    put = padding.index_put_first_axis(x[:2], torch.tensor([3, 1]), 4)
    assert torch.equal(put[[3, 1]], x[:2]) and not put[[0, 2]].any()
