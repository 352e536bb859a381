"""Memory of forward mode grows linearly with the sequence."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedattn.operators import tangent
from fusedattn.operators.namespace import OPERATORS

from ..inside import fields

ROOT = pathlib.Path(__file__).parents[2]
LONG, WIDTH = 16384, 64
# A step of one head: what it adds to the memory of a process at its peak, output and tangent among it.
STEP = f"""
import re
import torch
import fusedattn as fa

def peak():
    return 2**10 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
for length in (64, {LONG // 2}, {LONG}):  # the first loads what is loaded once
    inputs, directions = torch.randn(2, 3, 1, 1, length, {WIDTH}).unbind()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    with torch.no_grad():
        results = torch.func.jvp(fa.attention, (*inputs,), (*directions,))
    print(peak() - before)
    del results
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux forgets a peak")
def test_on_a_cpu_it_grows_as_the_sequence_does():
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, half, whole = map(int, done.stdout.split())
    given = 6 * LONG * WIDTH * 4  # bytes of query, key, value and their tangents
    assert whole <= 5 * given, f"{whole / given:.2f} times its inputs; all scores would be {LONG**2 * 4 / given:.0f}"
    assert whole <= 2.2 * half, f"{whole / half:.2f} times that of half the sequence"


class Made(TorchDispatchMode):
    """Notes how many elements each tensor has that is made inside."""

    def __init__(self):
        super().__init__()
        self.sizes, self.known = [], set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **options or {})
        before = {x.untyped_storage()._cdata for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before | self.known:
                self.known.add(x.untyped_storage()._cdata)
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return result


def _arguments(rows, backend, need_weights, device, **options):
    """Those of the operator, of one head, with a tangent of all that has one, and the results of a forward."""
    query, key, value, *moved = (torch.randn(1, 1, rows, WIDTH, device=device) for _ in range(6))
    call = fields(query, key, value, **options)
    out, _, _, stats = OPERATORS.forward(*call, False, False, True, backend)
    return *moved, None, None, None, out, stats, *call, need_weights, backend


@pytest.mark.parametrize("options", [{}, dict(right=0)], ids=["full", "causal"])
def test_kernels_are_given_no_more_than_their_results(options, device):
    """Counted at a length of which the interpreter makes short work: nothing that depends on the length is added."""
    rows = 200
    arguments = _arguments(rows, "triton", False, device, **options)
    with Made() as made:
        tangent._tangent(*arguments)
    assert sorted(filter(None, made.sizes)) == [rows, rows * WIDTH]


@pytest.mark.parametrize("need_weights", [False, True])
def test_results_at_any_length_are_the_output_and_lse_and_weights_if_they_are_wanted(need_weights):
    with FakeTensorMode():
        arguments = _arguments(LONG, "triton", need_weights, "cuda")
        results = OPERATORS.tangent(*arguments)
    assert [x.numel() for x in results] == [LONG * WIDTH, LONG, LONG**2 if need_weights else 0]
