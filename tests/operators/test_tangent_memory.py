"""Tests that the memory of forward mode grows linearly with the sequence length."""

import pathlib

import pytest

from ..conftest import run_python

LONG, WIDTH = 16384, 64
# Prints the peak memory that a step of one head adds, output and tangent included.
STEP = f"""
import re
import torch
import fusedattn as fa

def peak():
    return 2**10 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
for length in (64, {LONG // 2}, {LONG}):  # the first call loads libraries
    inputs, directions = torch.randn(2, 3, 1, 1, length, {WIDTH}).unbind()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    with torch.no_grad():
        results = torch.func.jvp(fa.attention, (*inputs,), (*directions,))
    print(peak() - before)
    del results
"""


@pytest.mark.matrix
@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux forgets a peak")
def test_on_a_cpu_it_grows_as_the_sequence_does():
    _, half, whole = map(int, run_python("-c", STEP).split())
    given = 6 * LONG * WIDTH * 4  # bytes of query, key, value and their tangents
    assert whole <= 5 * given, f"{whole / given:.2f} times its inputs; all scores would be {LONG**2 * 4 / given:.0f}"
    assert whole <= 2.2 * half, f"{whole / half:.2f} times that of half the sequence"
