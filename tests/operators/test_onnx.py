"""Tests of ONNX export: operators decompose into torch's own, and onnxruntime computes the model's results."""

import copy

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import torch as drop_in

from .. import sample
from ..cases import FEATURES, OPTIONS, Case
from ..close import assert_as_good, exactly

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = dict(B=3, Hq=4, Hkv=2, Sq=37, Sk=45)  # all sizes differ, so that a size identifies its dimension
OTHERS = dict(B=2, Sq=70, Sk=19)
DIMS = {SIZES[name]: torch.export.Dim(name, min=2, max=4096) for name in OTHERS}
MASKS = Case("masks", **SIZES, mask="pairs", key_mask="own", query_mask="own", causal=True)
SCORES = dict(bias="pairs", alibi="own", sinks=True, softcap=1.5, window=(9, 4), align="top_left", scale=-0.4)
TOGETHER = [MASKS, Case("scores", **SIZES, **SCORES)]
ALONE = [Case(name, **FEATURES[name] | SIZES) for name in OPTIONS]


class Call(torch.nn.Module):
    """Module that calls a function; its inputs are the function's tensors, in the order of `names`."""

    def __init__(self, function, names, **options):
        super().__init__()
        self.function, self.names, self.options = function, tuple(names), options

    def forward(self, *tensors):
        return self.function(**dict(zip(self.names, tensors, strict=True)), **self.options)


def exported(call, tensors, dims=None):
    """Return the ONNX program of a module; dims: {size: Dim} of the sizes that are dynamic."""
    tensors = tuple(tensors)
    shapes = tuple({axis: dims[size] for axis, size in enumerate(x.shape) if size in dims} for x in tensors if dims)
    shapes = (shapes,) if dims else None
    return torch.onnx.export(call.eval(), tensors, dynamo=True, verbose=False, dynamic_shapes=shapes)


@pytest.mark.parametrize("case", [*sample.named(TOGETHER), *sample.matrix(*sample.named(ALONE))])
@pytest.mark.one_in(2)
def test_onnxruntime_computes_a_call_of_any_batch_and_lengths(case):
    program, wanted = None, dict(return_lse=True, return_weights=True)
    for sizes in ({}, OTHERS):
        drawn, options = case._replace(**sizes).draw()
        inputs = {name: drawn[name] for name in ("query", "key", "value")}
        inputs |= {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
        options = {name: x for name, x in options.items() if name not in inputs} | wanted
        if program is None:
            program = exported(Call(fa.attention, inputs, **options), inputs.values(), DIMS)
        doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        eager, oracle = fa.reference.eager(**inputs, **options), fa.reference.attention(**doubled, **options)
        for results in zip(program(*inputs.values()), eager, oracle, ("out", "lse", "weights"), strict=True):
            assert_as_good(*results)


@pytest.mark.parametrize("head_dim", sample.one_in(2, [pytest.param(16), pytest.param(64)]))
def test_onnxruntime_computes_a_converted_layer(head_dim):
    theirs = torch.nn.TransformerEncoderLayer(2 * head_dim, 2, 48, batch_first=True).eval()
    ours = Call(drop_in.convert(copy.deepcopy(theirs)), ("src", "src_mask", "src_key_padding_mask"))
    program = None
    for batch, length in ((3, 11), (2, 17)):
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.arange(length) >= length - torch.arange(batch)[:, None]
        tensors = torch.randn(batch, length, 2 * head_dim), later, padding
        if program is None:
            dims = {batch: torch.export.Dim("batch", min=2), length: torch.export.Dim("length", min=2)}
            program = exported(ours, tensors, dims)
        oracle = exactly(torch.nn.Module.__call__, theirs, *tensors)
        assert_as_good(program(*tensors)[0], theirs(*tensors).detach(), oracle.detach())


def packed():
    return *torch.randn(3, 12, 4, 16), *[torch.tensor([0, 4, 5, 12], dtype=torch.int32)] * 2


def cached():
    return torch.randn(3, 4, 2, 16), *torch.randn(2, 3, 2, 9, 16), torch.tensor([3, 7, 5], dtype=torch.int32)


def paged():
    query, _, _, lengths = cached()
    table = torch.tensor([[5, 1], [0, 2], [4, 3]], dtype=torch.int32)
    return query, *torch.randn(2, 6, 2, 8, 16), lengths, table


def appended():
    return *cached(), *torch.randn(2, 3, 2, 2, 16)


PACKED = "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k"
CACHE = "query", "key_cache", "value_cache", "cache_seqlens"
LONGEST = dict(max_seqlen_q=7, max_seqlen_k=7)
OF_LENGTHS = {
    "packed": (packed, "attention_varlen", PACKED, dict(causal=True, **LONGEST)),
    "cache": (cached, "attention_decode", CACHE, dict(causal=True)),
    "pages": (paged, "attention_decode", (*CACHE, "block_table"), {}),
    "new keys": (appended, "attention_decode", (*CACHE, "new_key", "new_value"), dict(backend="naive")),
}


@pytest.mark.parametrize("name", OF_LENGTHS)
@pytest.mark.one_in(4)
def test_onnxruntime_computes_packed_sequences_and_caches(name):
    draw, function, names, options = OF_LENGTHS[name]
    tensors, options = draw(), dict(return_lse=True, **options)
    program = exported(Call(getattr(fa, function), names, **options), [x.clone() for x in tensors])
    got, results = program(*tensors), []
    options.pop("backend", None)
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype, copy=True) if x.is_floating_point() else x for x in tensors]
        results.append(getattr(fa.reference, function)(**dict(zip(names, given, strict=True)), **options))
    for each in zip(got, *results, strict=True):
        assert_as_good(*each)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if "fusedattn" in str(node.target)}


@pytest.mark.matrix
def test_only_onnx_decomposes():
    """torch.export keeps our operator; only the export to ONNX decomposes it, from a program or from a module."""
    tensors, dims = torch.randn(3, 3, 4, 37, 16).unbind(), {0: DIMS[3], 2: DIMS[37]}
    call = Call(fa.attention, ("query", "key", "value"))
    program = torch.export.export(call, tensors, dynamic_shapes=((dims,) * 3,))
    assert operators(program) == operators(program.run_decompositions()) == {"fusedattn.forward.default"}
    tensors = torch.randn(3, 2, 4, 50, 16).unbind()
    (got,) = torch.onnx.export(program, dynamo=True, verbose=False)(*tensors)
    assert_as_good(got, fa.reference.eager(*tensors), exactly(fa.reference.attention, *tensors))


@pytest.mark.matrix
def test_inductor_keeps_what_onnx_decomposes(monkeypatch):
    """Inductor compiles our operator after an ONNX export, which must remove its decomposition from torch's table."""
    monkeypatch.setenv("CI", "1")
    tensors = torch.randn(3, 2, 4, 37, 16).unbind()
    exported(Call(fa.attention, ("query", "key", "value")), tensors)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(fa.attention, fullgraph=True)(*tensors), fa.attention(*tensors))
