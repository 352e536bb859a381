"""Tests that calls on compute capability 9.0 use the Hopper kernels by default, forward and backward."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch._dynamo.config

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import rows

import fusedattn as fa
from fusedattn.call.options import Call, override
from fusedattn.dispatch import backends
from fusedattn.launch import forward, hopper, run, tile_table, tuned

from .. import cases
from ..inside import Plain, call_of, compiled
from ..offline import absent
from .test_tuned import FORWARD, PLACE, ROWS, SLIM, chosen  # noqa: F401

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200.csv"

pytestmark = pytest.mark.skipif(hopper.missing is not None, reason="needs Gluon")

CAUSAL = dict(causal=True)
COVERED = {
    "full": {}, "causal": dict(causal=True), "top left": dict(causal=True, align="top_left"),
    "window": dict(window=(300, 0)), "narrow window": dict(window=(4, 4)), "one side": dict(window=(None, 5)),
    "lse": dict(return_lse=True), "weights": dict(return_weights=True), "scale": dict(scale=0.3),
    "float16": dict(dtype=torch.float16),
}  # fmt: skip
# {D: (the backward, the deterministic backward)}
BACKWARDS = dict.fromkeys((64, 128), ("hopper_bwd", "hopper_bwd_deterministic"))
BACKWARDS |= {256: ("hopper_bwd_ds",) * 2, 512: ("hopper_bwd_wide",) * 2}


def draw(dim, length=300, heads=(8, 8), dtype=torch.bfloat16, batch=2, requires_grad=False):
    query, key = (torch.empty(batch, h, length, dim, dtype=dtype, device="meta") for h in heads)
    return [x.requires_grad_(requires_grad) for x in (query, key, key.clone())]


explain = functools.partial(fa.explain, capability=(9, 0))


@pytest.mark.parametrize("dim", [8, 64, 80, 128, 192, 256, 264, 512])
@pytest.mark.parametrize("name", COVERED)
def test_calls_that_hopper_covers_take_its_kernels(name, dim):
    options = dict(COVERED[name])
    inputs = draw(dim, heads=(8, (8, 2, 1)[len(name) % 3]), dtype=options.pop("dtype", torch.bfloat16))
    found = explain(*inputs, **options)
    backward, _ = BACKWARDS[tile_table.row_width(dim)]
    assert found.backend == "hopper" and not found.backward, str(found)
    assert [*found.tiles][:1] == ["hopper"] and backward in found.tiles
    assert not {"forward", "dq", "dkdv", "one_pass"} & {*found.tiles}


@pytest.mark.parametrize("dim", BACKWARDS)
def test_where_torch_wants_the_same_bits_the_backward_is_one_that_has_them(dim, passes):
    for wanted in (False, True):
        passes(1 + wanted)
        found = explain(*draw(dim, 2**16, requires_grad=True), causal=True)  # scores of some rows are stored at a time
        assert BACKWARDS[dim][wanted] in found.tiles and not found.backward


@pytest.mark.parametrize("dim", BACKWARDS)
def test_packed_sequences_take_its_kernels(dim):
    lengths = torch.tensor([0, 100, 300], dtype=torch.int32)
    inputs = [x.new_empty(300, x.shape[1], dim, device="cpu") for x in draw(dim, heads=(8, 2))]
    found = explain(*inputs, cu_seqlens_q=lengths, cu_seqlens_k=lengths, causal=True)
    assert found.backend == "hopper" and BACKWARDS[dim][0] in found.tiles
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        explain(*inputs, cu_seqlens_q=lengths)


ODD = [torch.empty(2 * 8 * 300 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 300, 64) for _ in range(3)]
EXPANDED = [draw(64, heads=(8, 1))[0], *(x.expand(-1, 8, -1, -1) for x in draw(64, heads=(8, 1))[1:])]
WIDE_VALUES, MASKED = [*draw(128)[:2], draw(256)[2]], dict(mask=torch.ones(300, 300, dtype=torch.bool, device="meta"))
SLOPES, NO_TILE = dict(alibi_slopes=torch.ones(8, device="meta")), "no tile has room for %s with heads of 256 columns"
OTHERS = {  # (inputs, options, backend of the call, reason against the preferred backend)
    "slopes, mask": (draw(256), SLOPES | MASKED, "triton", NO_TILE % "alibi_slopes and mask"),
    "mask, wide values": (WIDE_VALUES, MASKED, "triton", NO_TILE % "mask"),
    "bias": (draw(128), dict(bias=torch.empty(300, 301, device="meta")[:, 1:]), "triton", "strides of bias"),
    "strides": (EXPANDED, {}, "triton", "strides of key"),  # TMA cannot read stride 0
    "address": (ODD, {}, "triton", "query lies at an address that is no multiple of 16"),
    "address of a subclass": ([x.as_subclass(Plain) for x in ODD], {}, "triton", "key lies at an address"),
    "float32": (draw(64, dtype=torch.float32), {}, "triton", "float32"),
    "float64": (draw(64, dtype=torch.float64), {}, "naive", "float64"),
    "an old GPU": (draw(64), dict(capability=(7, 5)), "naive", "7.5, less than 8.0"),
    **{f"{n}": (draw(64), dict(capability=n), "triton", "not 9.0") for n in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))},
}

LONG = [torch.empty(1, 8, 4096, 100, dtype=torch.bfloat16, device="meta") for _ in range(3)]
SLICED = [x.new_empty(1, 8, 4096, 65)[..., 1:] for x in LONG]


@pytest.mark.parametrize("inputs", [LONG, SLICED, [x[..., :61] for x in LONG]], ids=["D 100", "strides", "D 61"])
@pytest.mark.parametrize("options, taken", [({}, True), (CAUSAL, True), (dict(window=(300, 0)), False)])
def test_copies_are_made_where_rows_see_many_keys(inputs, options, taken):
    found = explain(*inputs, **options)
    assert (found.backend == "hopper") == taken and not (taken and found.backward)
    short = [x[:, :, :1000] for x in inputs]
    assert explain(*short, **options).backend == "triton"


OF_SCORES = {
    "softcap": dict(softcap=3.0), "scale": dict(scale=0.0), "dropout": dict(dropout_p=0.1, seed=1),
    "sinks": dict(sinks=torch.ones(8, device="meta")), "slopes": SLOPES, "mask": MASKED,
    "query mask": dict(query_mask=torch.ones(2, 300, dtype=torch.bool, device="meta")),
    "key mask": dict(key_mask=torch.ones(2, 300, dtype=torch.bool, device="meta")),
    "bias": dict(bias=torch.empty(8, 304, 304, dtype=torch.bfloat16, device="meta")[None, :, :300, :300]),
    "bias of rows": dict(bias=torch.empty(300, 1, device="meta")),
}  # fmt: skip

OFFSETS, LONG_SEQUENCE = ("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 32768], dtype=torch.int32)
BIAS_MASK, SOFTCAP = OF_SCORES["bias"] | OF_SCORES["mask"], OF_SCORES["softcap"]
MOST = BIAS_MASK | SOFTCAP | OF_SCORES["slopes"] | OF_SCORES["dropout"]
ONLY_FORWARD = {  # {why: (inputs, options)}
    "supports 3 of softcap, bias, mask at once, 2 with bias and mask": (draw(128), BIAS_MASK | SOFTCAP),
    "supports 3 of softcap, alibi_slopes, bias, dropout_p at once": (draw(128), {**MOST, "mask": None}),
    "supports 4 of softcap, alibi_slopes, bias, dropout_p, mask at once": (draw(64), MOST),
    "no tile has room for bias": (draw(256), dict(bias=torch.empty(300, 304, device="meta")[:, :300])),
    "nor those of key and value alone": ([x.requires_grad_(n > 0) for n, x in enumerate(draw(64))], {}),
    "take 2056 MiB": ([torch.empty(32768, 2, 256, dtype=torch.bfloat16)] * 3, dict.fromkeys(OFFSETS, LONG_SEQUENCE)),
}


@pytest.mark.parametrize("why", ONLY_FORWARD)
def test_calls_whose_backward_others_take(why):
    inputs, options = ONLY_FORWARD[why]
    found = explain(*inputs, **options)
    assert found.backend == "hopper" and any(why in sentence for sentence in found.backward)
    assert "hopper" in found.tiles and {"one_pass", "dkdv"} & {*found.tiles}
    assert not {*tile_table.BACKWARDS} & {*found.tiles}


@pytest.mark.parametrize("without", ["64 bias", "64 alibi_slopes", "128 bias softcap", "128 mask seed dropout_p"])
def test_calls_of_many_options(without):
    dim, *names = without.split()
    found = explain(*draw(int(dim)), **{name: x for name, x in MOST.items() if name not in names})
    assert found.backend == "hopper" and not found.backward


@pytest.mark.parametrize("dim", [128, 192, 256, 512])
@pytest.mark.parametrize("name", OF_SCORES)
def test_heads_of_each_width_take_each_option(name, dim):
    found = explain(*draw(dim)[:2], draw(128 if dim == 192 else dim)[2], **OF_SCORES[name])
    backward, _ = BACKWARDS[tile_table.row_width(dim)]
    assert found.backend == "hopper" and not found.backward and {"hopper", backward} <= {*found.tiles}


@pytest.mark.parametrize("case", cases.WIDE[::7], ids=lambda case: case.name)
def test_no_call_with_wide_heads_takes_the_naive_path(case):
    tensors, options = case.draw()
    inputs = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
        found = fa.explain(*inputs, **options, capability=capability)
        assert found.backend in ("hopper", "triton") and len(found.tiles) >= 3, str(found)


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_does_not_cover_others_take(name):
    inputs, options, backend, why = OTHERS[name]
    found = explain(*inputs, **options)
    assert found.backend == backend
    assert why in "; ".join(found.reasons["hopper" if backend == "triton" else "triton"])
    assert not {"hopper_bwd", "hopper"} & {*found.tiles}
    # Hopper's backward takes these two.
    if backend == "triton" and "capability" not in options and name not in ("slopes, mask", "mask, wide values"):
        assert any(why in sentence for sentence in found.backward)


def test_a_named_backend_is_the_one_that_runs_or_raises():
    found = explain(*draw(64), backend="triton")
    assert found.backend == "triton" and found.backward == ["'triton' is named"]
    assert explain(*draw(64), backend="hopper", capability=(8, 0)).backend is None
    assert explain(*draw(64), backend="cpu").backend is None, "the GPU is asked about, not a CPU"


@pytest.mark.parametrize(
    "length, options, warpgroups",  # limits measured on an H200 (bench/NOTES.md)
    [
        *((2048, {}, 3), (2047, {}, 2), (8192, CAUSAL, 3), (8191, CAUSAL, 2), (8192, dict(window=(512, 512)), 2)),
        # A side of the window that hides nothing does not count.
        *((2048, dict(window=(2047, 2047)), 3), (2048, dict(window=(2046, 2047)), 2)),
        *((8192, dict(window=(8191, 0)), 3), (8192, dict(softcap=3.0), 2)),
    ],
    ids=str,
)
def test_long_calls_of_narrow_heads_take_three_warpgroups(length, options, warpgroups):
    assert explain(*draw(64, length), **options).tiles["hopper"].warpgroups == warpgroups
    bias = torch.empty(1, length, device="meta")  # of which a tile has one row
    assert explain(*draw(128, length), bias=bias, **options).tiles["hopper"][:2] == (2, 128)
    assert "hopper_bwd_ds" in explain(*draw(256, 2 * length), **options).tiles


def test_the_answer_is_not_about_the_machine_that_gives_it():
    inputs = [torch.randn(1, 2, 70, 64, dtype=torch.bfloat16) for _ in range(3)]
    assert explain(*inputs).backend == "hopper"
    assert fa.explain(*inputs).backend == "cpu"
    with fa.use_backend("triton"):
        assert explain(*inputs).backend == "triton"


@pytest.mark.parametrize("capability", [(9,), 90, "9.0", (9.0, 0), (True, 0), (0, 0), (9, 10), (-9, 0)], ids=str)
def test_a_capability_that_is_none_is_refused(capability):
    with pytest.raises(ValueError, match=r"^capability: expected None or a compute capability such as \(9, 0\), got"):
        fa.explain(*draw(64), capability=capability)


COPIED, PART, LENGTH = {2048: "hopper", 500: "forward"}, (False, False, True, "hopper"), torch.ones(2).int()
GRAPHS = {  # {name: (function, D, {rows: a kernel of calls with so many rows})}; -rows: all of them are 0
    "kept batches": (lambda x: fa.attention(*[x[x[:, 0, 0, 0] != 0]] * 3), 64, {7: "hopper", -7: None}),
    "kept rows": (lambda x: fa.attention(*[x[:, :, x[0, 0, :, 0] != 0]] * 3), 64, {7: "hopper", -7: None}),
    "bias": (lambda x: fa.attention(x, x, x, bias=x @ x.mT), 64, {96: "hopper", 97: "forward", 104: "hopper"}),
    "D 100": (lambda x: fa.attention(x, x, x), 100, COPIED),
    "part": (lambda x: torch.ops.fusedattn.forward(*Call(x, x, x, partial=True), *PART)[0], 100, COPIED),
    "decode": (lambda x: fa.attention_decode(x, x, x, cache_seqlens=LENGTH), 64, {99: "decode_64", 128: "hopper"}),
}


@compiled
@pytest.mark.parametrize("name", GRAPHS)
def test_one_graph_takes_the_kernel_of_each_size(name, monkeypatch):
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    (function, dim, kernels), launched, graphs = GRAPHS[name], [], []
    monkeypatch.setattr(run, "run_kernel", lambda name, *_, **__: launched.append(name))
    step = torch.compile(function, backend=lambda *x: graphs.append(1) or x[0], fullgraph=True, dynamic=True)
    with absent.gpu(90), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for length, kernel in kernels.items():
            step(torch.full((2, 2, abs(length), dim), float(length > 0)).bfloat16())
            assert kernel in (launched or [None]) and ("hopper" in launched) == (kernel == "hopper")
            launched.clear()
    assert len(graphs) == 1


@compiled
def test_what_a_file_finds_slower_or_wrong_is_left_to_calls_that_name_it(chosen, monkeypatch):  # noqa: F811
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    chosen(ROWS)
    inputs = [torch.randn(1, 2, 70, 128, dtype=torch.bfloat16) for _ in range(3)]
    with absent.gpu(90):
        found = fa.explain(*inputs)
        assert found.backend == "triton" and tuned.SLOWER in found.reasons["hopper"] and "hopper_bwd" in found.tiles
        assert fa.explain(*inputs, backend="hopper").backend == "hopper"
        for repeatable, options in itertools.product((False, True), (dict(causal=True), dict(window=(4, 0)))):
            with override(deterministic=repeatable):
                found = fa.explain(*inputs, **options)
                assert found.backend == "hopper" and found.tiles["hopper"] == SLIM and found.backward == [tuned.SLOWER]
                assert not {"hopper_bwd", "hopper_bwd_deterministic"} & {*found.tiles}
        wrong = [tuned.Row("hopper", *PLACE, x, why="NaN") for x in tile_table.HOPPER[128]]
        chosen([*wrong, ROWS[-1]._replace(why="NaN")])
        with pytest.raises(NotImplementedError, match="found no 'hopper' that gives right numbers"):
            fa.attention(*inputs, backend="hopper")
        assert fa.explain(*inputs).backward == [f"{run.none_is_right('hopper_bwd', inputs[0].device)}"]
        chosen([*wrong, *(tuned.Row("forward", *PLACE, tile, why="NaN") for tile in FORWARD)])
        graph = torch.compile(fa.attention, backend="aot_eager", fullgraph=True)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with pytest.warns(UserWarning, match="takes a slower path: .* found no 'forward' that gives right numbers"):
            got = torch.autograd.grad(graph(*leaves).sum(), leaves)
    want = torch.autograd.grad(fa.attention(*leaves, backend="naive").sum(), leaves)
    assert all(map(torch.equal, got, want)), "the gradients are of the path that computed the forward"


def _measured():
    """Return {case: {pipeline: ms}} of the last run in h200.csv that timed several pipelines."""
    found = {}
    for row in rows.read(RESULTS):
        kind, _, name = row.provider.partition(":hopper/")
        if name and row.mode == "forward" and row.status == "ok":
            found.setdefault((row.case, row.date), {})[name] = row.ms_p50
    return {case: ms for (case, _), ms in sorted(found.items(), key=lambda item: item[0][1]) if len(ms) > 1}


def test_the_chosen_pipeline_is_the_fastest_that_was_measured():
    """The default pipeline is at most 3 % (the spread between runs) slower than the fastest in h200.csv."""
    measured = _measured()
    assert len(measured) > 30
    for case, ms in measured.items():
        x = torch.empty(case.B, case.Hq, case.Sq, case.D, dtype=torch.bfloat16, device="meta")
        form = fa.explain(x, x, x, causal=case.causal, capability=(9, 0)).tiles["hopper"]
        blocks = -(-case.Sq // form.rows) * case.B * case.Hq
        call = call_of(x, x, x, causal=case.causal)
        alone = forward.programs_on_hopper(call, form, 1, tile_table.MULTIPROCESSORS) == blocks
        name = f"{form.rows}x{form.keys}s{form.stages}{'+grid' * alone}"  # +grid: a program had one block of rows
        assert ms.get(name, ms[name.removesuffix("+grid")]) <= 1.03 * min(ms.values()), (case.name, name, ms)
