"""The table of features: each cell is what asking finds, and what the page and the README have."""

import shutil
from unittest import mock

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.tolerance import verdict

from ..cases import Case
from ..sample import matrix, named
from . import __main__ as report, cells, packages, probes
from .rows import FEATURES

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of
# torch's compiler takes seconds to start, and `make test` has it elsewhere.
FEW = [x for one in named(FEATURES) for x in (matrix(one) if one.values[0].way == "compiled" else [one])]
EVERY = pytest.mark.parametrize("feature", named(FEATURES))


def kept(name, feature):
    cell, _, version = cells.kept()[feature.name, name]
    if version != cells.version(name):
        pytest.skip(f"the table is of {version}; `python -m tests.features --report` is of {cells.version(name)}")
    return cell


@pytest.mark.parametrize("feature", FEW)
def test_ours(feature):
    assert cells.find(cells.OURS, feature).word == kept(cells.OURS, feature) == "yes"


@pytest.mark.matrix
@EVERY
def test_our_kernels(feature, device):
    assert cells.found(packages.ours("triton", device), feature).word == kept(cells.OURS, feature)


@pytest.mark.matrix
@EVERY
def test_sdpa(feature):
    assert kept(cells.SDPA, feature) == cells.find(cells.SDPA, feature).word


@pytest.mark.matrix
@EVERY
def test_flex(feature):
    assert kept(cells.FLEX, feature) == cells.find(cells.FLEX, feature).word


@pytest.mark.matrix
def test_what_flex_has_forward_it_compiles_to_one_kernel(monkeypatch):
    flex_attention = _compiler_of_flex()
    everything = dict(B=2, Hq=4, Hkv=2, Sq=17, Sk=19, Dv=8, causal=True, window=(8, None), softcap=1.5, alibi="own")
    tensors, options = Case("", **everything, mask="batch", key_mask="own", bias="heads").draw()
    inputs = [tensors[name].nan_to_num(0, 0, 0) for name in probes.INPUTS]
    documents = torch.arange(19) // 8
    options["mask"][:, :, 3] = False  # rows that see nothing
    options = {name: x for name, x in options.items() if name not in ("align", "scale")}
    attend = packages.flex(torch.compile(flex_attention, fullgraph=True)).attend
    (got,) = attend(*inputs, **options | dict(window=(8, 17)), documents=documents)
    options["mask"] = options["mask"] & (documents[:17, None] == documents)
    exact = {name: options[name].double() for name in ("bias", "alibi_slopes")}
    oracle = fa.reference.attention(*(x.double() for x in inputs), **options | exact)
    assert not verdict(got, fa.reference.eager(*inputs, **options), oracle).why


@pytest.mark.matrix
def test_flex_has_pages_when_it_is_compiled_and_no_lse():
    function = torch.compile(_compiler_of_flex(), fullgraph=True)
    compiled = packages.flex(function)
    (pages,) = (feature for feature in FEATURES if feature.way == "cached")
    assert cells.found(compiled, pages).word == kept(cells.FLEX, pages)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(RuntimeError, match="return_lse"):
        compiled.attend(*torch.randn(3, 1, 2, 16, 16), return_lse=True)


def _compiler_of_flex():
    if not any(map(shutil.which, ("g++", "clang++", "cl"))):
        pytest.skip("torch compiles for a CPU with a C++ compiler")
    kept(cells.FLEX, FEATURES[0])
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return flex_attention


@EVERY
def test_flash_attn_by_its_signatures_and_sources(feature):
    read = cells.read_of_flash_attn(feature).word
    assert kept(cells.FLASH, feature) in ({"yes"} | {read} if read == "offered" else {read})


@pytest.mark.gpu
@EVERY
def test_flash_attn_on_a_gpu(feature, cuda):
    pytest.importorskip("flash_attn")
    if cells.read_of_flash_attn(feature).word == "offered":
        assert cells.find(cells.FLASH, feature).word == "yes"


def test_what_sdpa_offers_is_in_the_schemas_of_its_operators():
    forward, backward = (
        getattr(torch.ops.aten, f"{cells.EFFICIENT}{more}").default._schema for more in ("", "_backward")
    )
    assert {"attn_bias", "dropout_p"} <= {x.name for x in forward.arguments}
    assert "bool[4] grad_input_mask" in str(backward) and len(backward.returns) == 4


@pytest.mark.matrix
@EVERY
def test_a_slightly_wrong_answer_is_seen(feature):
    """Each question tells a right answer from one that is off by a thousandth."""
    right = packages.ours()

    def attend(*inputs, **options):
        out, *rest = right.attend(*inputs, **options)
        return (1.001 * out, *(1.001 * x for x in rest))

    wrong = right._replace(
        attend=attend,
        packed=lambda *inputs: 1.001 * right.packed(*inputs),
        cached=lambda *inputs: 1.001 * right.cached(*inputs),
    )
    assert cells.found(wrong, feature).word == "wrong"


def test_a_refusal_is_told_from_an_answer():
    (feature,) = (feature for feature in FEATURES if feature.name == "causal")
    refusing = mock.Mock(side_effect=NotImplementedError("not\nyet"))
    assert cells.found(packages.ours()._replace(attend=refusing), feature) == ("no", "not")


def test_the_page_and_the_readme_have_what_is_kept():
    """After a change: python -m tests.features --report."""
    found = cells.kept()
    assert list(found) == [(feature.name, name) for feature in FEATURES for name in cells.COLUMNS]
    assert report.PAGE.read_text() == report.text(found)
    assert report.in_readme() == report.short(found)
    words = {word for cell, _, _ in found.values() for word in cell.split("; ")}
    assert words <= set(cells.WORDS)
