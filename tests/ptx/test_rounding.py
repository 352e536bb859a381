"""A product and a sum that become one instruction are rounded once, else twice: both are right.

Kernels are compiled with `enable_fp_fusion`, whatever Triton's default is. Without it no float32 is contracted, neither
by LLVM nor, since each operation then names its rounding, by ptxas.
"""

import re
from unittest import mock

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from triton import knobs

from fusedattn.launch import launcher

from ..sample import matrix
from . import calls
from .cases import ENTRIES, HOPPER

CONTRACTED = re.compile(r"\tfma\.rn\.f32\b")  # those of libdevice flush subnormals: fma.rn.ftz
CONTRACTIBLE = re.compile(r"\t(mul|add|sub)\.f32\b")
FIRST, *REST = (
    ("decode: new keys in pages", HOPPER),
    ("plain D64", 80),
    ("hopper D128", HOPPER),
)


def _unfused(kernel, programs, arguments, options, load=launcher.load):
    options["enable_fp_fusion"] = False
    return load(kernel, programs, arguments, options)


def test_the_default_of_triton_changes_nothing():
    with knobs.language.scope():
        knobs.language.default_fp_fusion = False
        outcome = calls.execute(ENTRIES[FIRST[0]], FIRST[1])
    kernels = [launch.kernel for launch in outcome.device.launches]
    assert all(kernel.metadata.enable_fp_fusion for kernel in kernels)
    assert any(CONTRACTED.search(kernel.asm["ptx"]) for kernel in kernels)


@pytest.mark.parametrize("name, capability", [FIRST, *matrix(*(pytest.param(*each) for each in REST))])
def test_a_call_whose_kernels_contract_nothing(name, capability):
    with mock.patch.object(launcher, "load", _unfused):
        outcome = calls.execute(ENTRIES[name], capability)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    for launch in outcome.device.launches:
        ptx, source = launch.kernel.asm["ptx"], launch.kernel.asm["ttgir"]
        assert not CONTRACTIBLE.search(ptx)
        assert bool(CONTRACTED.search(ptx)) == ("math.fma" in source)  # only what a kernel asks for itself
