"""Tests that the code of pages and docstrings runs, and that the reference has each public name."""

import doctest
import importlib
import inspect
import re
import sys
import types
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

import fusedattn as fa
from docs import pictures, tables

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "pages"
PAGES = sorted(FOLDER.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.M | re.S)
LANGUAGES = {"python", "text", "bash"}


def name(page):
    return page.relative_to(FOLDER).with_suffix("").as_posix()


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run a page in a new folder; afterwards forget the module flash_attn, which it may install."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for module in set(sys.modules) - before:
        if module.partition(".")[0] == "flash_attn":
            del sys.modules[module]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_its_code_runs(page, alone, monkeypatch):
    # Compilers import a function's module by name, and torch 2.10 caches it.
    module = types.ModuleType("page_" + re.sub(r"\W", "_", name(page)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for language, _, code in FENCE.findall(tables.on_page_markdown(page.read_text())):
        assert language in LANGUAGES, f"a block of {language or 'no language'}"
        if language == "python":
            for said, package in {"from transformers": "transformers", "torch.onnx": "onnxscript"}.items():
                if said in code:
                    pytest.importorskip(package)
            exec(compile(code, name(page), "exec"), vars(module))


@pytest.mark.parametrize("picture", pictures.PICTURES)
def test_a_picture_is_small_and_used(picture):
    drawn = pictures.PICTURES[picture]()
    assert xml.etree.ElementTree.fromstring(drawn).tag.endswith("svg") and len(drawn) < 20_000
    assert any(f"images/{picture}.svg" in page.read_text() for page in PAGES)


def test_tables_are_made_from_rows():
    used = re.findall(r"^<!-- table: (\w+) -->$", "".join(page.read_text() for page in PAGES), re.M)
    assert sorted(used) == sorted(tables.TABLES)
    assert all(tables.TABLES[table]().count("\n") > 3 for table in used if not table.endswith("_machine"))


def public():
    modules = {"fusedattn": fa, "fusedattn.compat.torch": fa.compat.torch, "fusedattn.distributed": fa.distributed}
    modules |= {"fusedattn.tuning": importlib.import_module("fusedattn.tuning"), "fusedattn.compat": fa.compat}
    found = {f"{module}.{name}": getattr(own, name) for module, own in modules.items() for name in own.__all__}
    for module in ("layers", "masks", "plot", "reference", "compat.flash_attn", "compat.transformers"):
        home = {f"fusedattn.{module}", "fusedattn.api"} if module == "reference" else {f"fusedattn.{module}"}
        for name, member in vars(sys.modules[f"fusedattn.{module}"]).items():
            if callable(member) and not name.startswith("_") and getattr(member, "__module__", "") in home:
                found[f"fusedattn.{module}.{name}"] = member
    return found


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text() for page in (FOLDER / "reference").glob("*.md"))
    entries = set(re.findall(r"^::: ([\w.]+)$", pages, re.M)) | set(re.findall(r"`(fusedattn\.[\w.]+)`", pages))
    entries |= set(re.findall(r"^## (fusedattn\.[\w.]+)$", pages, re.M))
    assert not set(public()) - entries


# names without an example: results of functions, a callback, and functions that refer to another docstring
BARE = {"fusedattn.Plan", "fusedattn.Explanation", "fusedattn.compat.transformers.fusedattn_forward"}
BARE |= {f"fusedattn.reference.{name}" for name in ("attention", "attention_varlen", "attention_decode")}
PUBLIC = {name: x for name, x in public().items() if not inspect.ismodule(x)} | {
    "fusedattn.compat.flash_attn": fa.compat.flash_attn,
    "fusedattn.layers.from_config": fa.layers.FeedForward.from_config,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in BARE and ".masks." not in name])
def test_its_example_runs(name, alone):
    documented = PUBLIC[name]
    if "transformers" in name:
        pytest.importorskip("transformers")
    if "plot" in name:
        pytest.importorskip("matplotlib")
    names = dict(torch=torch, fusedattn=fa)
    names |= vars(fa.compat.flash_attn) if name.startswith("fusedattn.compat.flash_attn") else {}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(documented), names, name, None, None)
    assert example.examples, "no example"
    printed = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert not printed, "".join(printed)
