"""Forward mode by the PTX that Triton makes of its kernels: tangents of output, lse and weights."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa

from ..cases import Case
from ..sample import matrix
from ..tangents import compare, directions, with_tangents
from . import device

BF16, FP16 = torch.bfloat16, torch.float16
OF_16_BITS = Case("")._replace(dtype=BF16, Sq=150, Sk=200, D=64, Dv=64, Hq=2, Hkv=1)
MANY = dict(bias="heads", softcap=5.0, alibi="own", sinks=True, dropout=0.2, key_mask="own", mask="pairs")
CALLS = {  # what a case has besides, and the GPU
    "plain D64": ({}, 80),
    "causal D64": (dict(causal=True), 90),
    "D128": (dict(D=128, Dv=128, dtype=FP16, causal=True), 80),
    "D128 on 9.0": (dict(D=128, Dv=128), 90),
    "window D256": (dict(D=256, Dv=256, Sq=70, Sk=100, window=(40, 20)), 90),
    "everything": (MANY | dict(Sq=70, Sk=90), 90),
    "fp32 D40": (dict(dtype=torch.float32, D=40, Dv=24, Sq=70, Sk=90), 80),
}
FIRST, *REST = (pytest.param(name, id=name.replace(" ", "_")) for name in CALLS)


@pytest.mark.parametrize("name", [FIRST, *matrix(*REST)])
def test_tangents_by_compiled_code(name):
    fields, capability = CALLS[name]
    tensors, options = OF_16_BITS._replace(name=name, **fields).draw()
    moved = directions(tensors, options)
    with device.gpu(capability) as there:
        got = with_tangents(lambda **given: fa.attention(**given, backend="triton"), tensors, options, moved)
    assert {"tangent", "tangent_p"} <= {launch.name for launch in there.launches}
    found = {each: verdict.why for each, verdict in compare(got, tensors, options, moved).items() if not verdict.ok}
    found |= {launch.name: str(launch.report) for launch in there.launches if launch.report.found}
    assert not found
