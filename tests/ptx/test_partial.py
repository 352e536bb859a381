"""Tests partial calls, which have only some of the keys that rows see, by the kernels' PTX: results are float32."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn import reference
from fusedattn.call.options import INPUTS, Call
from fusedattn.launch import forward
from fusedattn.operators.namespace import OPERATORS
from fusedattn.testing import compare
from fusedattn.testing.tolerance import verdicts

from ..close import assert_close
from ..partial import at_once, by_parts, draw, oracle
from . import calls, device

ODD, ALIGNED = (slice(13, 149), (0, 70, 200)), (slice(16, 150), (0, 64, 200))
FAR = slice(0, 20), (0, 110, 200)  # no row sees a key of the last part
CASES = {  # backend, capability, dtype, (D, Dv), options, options with gradients, rows and cuts
    "hopper D64, causal": ("hopper", 90, torch.bfloat16, (64, 64), dict(causal=True), (), ODD),
    "hopper D128 fp16, sinks": ("hopper", 90, torch.float16, (128, 128), dict(window=(90, 4)), ("sinks",), ODD),
    "hopper D128, three splits of the keys": ("hopper", 90, torch.bfloat16, (128, 128), dict(causal=True), (), ODD),
    "hopper D128, hidden part": ("hopper", 90, torch.bfloat16, (128, 128), dict(causal=True), (), FAR),
    "hopper D40 Dv24": ("hopper", 90, torch.bfloat16, (40, 24), {}, (), ODD),
    "hopper D128, cap, slopes": ("hopper", 90, torch.float16, (128, 128), dict(softcap=2.0), ("alibi_slopes",), ODD),
    "hopper D80, dropout": ("hopper", 90, torch.bfloat16, (80, 80), dict(dropout_p=0.3, seed=5), (), ALIGNED),
    "hopper D256, causal": ("hopper", 90, torch.bfloat16, (256, 256), dict(causal=True), (), ODD),
    "hopper D192 Dv136 fp16, sinks": ("hopper", 90, torch.float16, (192, 136), dict(window=(90, 4)), ("sinks",), ODD),
    "hopper D512, causal": ("hopper", 90, torch.bfloat16, (512, 512), dict(causal=True), (), ODD),
    "hopper D64 Dv320": ("hopper", 90, torch.bfloat16, (64, 320), {}, (), ODD),
    "slopes, two passes": ("triton", 80, torch.bfloat16, (64, 64), dict(causal=True), ("alibi_slopes",), ODD),
    "dropout, aligned": ("triton", 80, torch.bfloat16, (64, 64), dict(dropout_p=0.3, seed=5), (), ALIGNED),
    "one pass": ("hopper", 90, torch.bfloat16, (64, 64), dict(dropout_p=0.3, seed=5, causal=True), (), ODD),
    "fp32 D40": ("triton", 80, torch.float32, (40, 24), dict(causal=True, softcap=3.0), (), ODD),
}
ALWAYS = "hopper D64, causal", "hopper D40 Dv24", "hopper D128, hidden part", "slopes, two passes", "one pass"


def pytest_generate_tests(metafunc):
    """Run cases that differ in kernel code, or all cases with --everything."""
    some = CASES if metafunc.config.getoption("--everything", False) else ALWAYS
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", some, ids=lambda name: name.replace(" ", "_"))


@pytest.mark.matrix
@pytest.mark.filterwarnings("error:fusedattn takes a slower path")
def test_parts_by_compiled_code(name, monkeypatch):
    if "splits" in name:  # otherwise so few keys would not be split
        monkeypatch.setattr(forward, "splits_on_hopper", lambda *_: 3)
    backend, capability, dtype, columns, options, learned, (rows, cuts) = CASES[name]
    tensors, more = draw(dtype, 150, 200, columns, batch=1, learned=learned)
    options = options | more
    with device.gpu(capability) as gpu:
        found = by_parts(tensors, options, rows, cuts, backend)
    by_hopper = backend == "hopper" and name != "one pass"  # of dropout Hopper takes aligned parts
    assert by_hopper == bool({"backward", "grad_product"} & {launch.name for launch in gpu.launches})
    assert all(x.dtype == torch.float32 for x in found.values())
    eager, exact = (function(each, tensors, options, rows) for function, each in FUNCTIONS)
    for name in ("lse", "alibi_slopes"):  # tests in the interpreter check these
        for results in (found, eager, exact):
            results.pop(name, None)
    wrong = calls.Outcome(verdicts(found, eager, exact), gpu, found).wrong()
    assert not wrong, "\n".join(wrong)


@pytest.mark.matrix
@pytest.mark.filterwarnings("error:fusedattn takes a slower path")
@pytest.mark.parametrize("dim, grads", [(64, "out"), (64, "lse"), (256, "out")])
def test_all_keys_and_sinks_in_one_part(dim, grads):
    """`ulysses_attention` makes such a call if ranks share a key head."""
    kernels = ["dq", "backward", "postprocess"] if dim == 64 else ["dq", "stored_backward"]
    query, key, value, grad = torch.randn(4, 1, 2, 40, dim).bfloat16()
    incoming = dict(out=grad, lse=torch.randn(1, 2, 40))
    call = Call(query, key, value, sinks=torch.tensor([[0.5, 2.0]]), scale=dim**-0.5, partial=True)
    need = [name in (*compare.INPUTS, "sinks") for name in INPUTS]
    with device.gpu(90) as gpu:
        out, lse, _, stats = OPERATORS.forward(*call, True, False, True, "hopper")
        given = [incoming[name] if name == grads else None for name in ("out", "lse", "weights")]
        found = OPERATORS.backward(*given, out, out.new_empty(0), stats, *call, "hopper", need)
    assert [launch.name for launch in gpu.launches][1:][: 1 + len(kernels)] == ["preprocess", *kernels]
    found = {name: x for name, x, wanted in zip(INPUTS, found, need, strict=True) if wanted}
    found |= dict(out=out, lse=lse, sinks=found["sinks"][0])
    assert_close(found, dict(query=query, key=key, value=value, **incoming), dict(sinks=call.sinks[0]), grads)


@pytest.mark.matrix
@pytest.mark.filterwarnings("error:fusedattn takes a slower path")
def test_a_float32_bias_of_the_widest_heads_fits_a_small_gpu():
    inputs = [torch.randn(1, 1, 16, 512).bfloat16().requires_grad_() for _ in range(3)]
    with device.gpu(86) as gpu:
        fa.attention(*inputs, bias=torch.randn(1, 1, 16, 16), backend="triton").sum().backward()
    assert gpu.launches[-1].name == "dkdv"


FUNCTIONS = (at_once, reference.eager), (oracle, reference.attention)
