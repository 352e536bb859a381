"""Would anybody see it, if compiled code were wrong?    python -m tests.ptx.mutants [80 90] [--each 3] [--kind barrier]

Breaks the PTX of a kernel in one place at a time, and executes calls of it until one shows it: by an access out of
bounds, a race or hazard that is reported, or a result that differs by more than rounding. The calls have the edges at
which a comparison that is off by one differs: rows and keys at 0 and 1, and around a tile, and windows that end there.
"""

import argparse
import functools
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import fusedattn as fa

from . import device
from .calls import HARMLESS
from .report import Fault

STEPS = 3000  # blocks of instructions, after which a mutant is taken to go on for ever
# What LLVM counts as an error of the caller, not of a call: a mutant may come to it.
SEEN = Fault, NotImplementedError, IndexError, RecursionError


class Mutation(NamedTuple):
    """One way to break a line: what kind of mistake it stands for, a pattern of the line, and what it becomes."""

    kind: str
    name: str
    pattern: str
    becomes: str | Callable


def _plus(template, less=0):
    """A replacement in which the number that was found is one more."""
    return lambda found: template.format(int(found[1]) + 1 - less)


def _flipped(template, bit):
    """A replacement in which a bit of the last group is another."""
    return lambda found: template.format(*found.groups()[:-1], int(found[found.lastindex]) ^ bit)


MUTATIONS = (
    Mutation("layout", "a bit of a swizzle", r"^\txor\.b32 (.*), (\d+);", _flipped("\txor.b32 {}, {};", 16)),
    Mutation("layout", "an address off by 16", r"\[%r(\d+)\+(\d+)\]", _flipped("[%r{}+{}]", 16)),
    Mutation(
        "layout", "matrix not transposed", r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", "ldmatrix.sync.aligned.m8n8.x4"
    ),
    Mutation(
        "layout",
        "matrix transposed",
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
    ),
    Mutation(
        "layout",
        "stored transposed",
        r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared",
        "stmatrix.sync.aligned.m8n8.x4.trans.shared",
    ),
    Mutation("layout", "wrong lane", r"shfl\.sync\.bfly\.b32(.*), 1, 31", r"shfl.sync.bfly.b32\1, 4, 31"),
    Mutation(
        "layout", "halves swapped", r"cvt\.rn\.bf16x2\.f32 (.*), (%r\d+), (%r\d+);", r"cvt.rn.bf16x2.f32 \1, \3, \2;"
    ),
    Mutation(
        "layout", "next part of a matrix", r"^\tadd\.s64 (.*), 46116862(\d+);", _flipped("\tadd.s64 {}, 46116862{};", 2)
    ),
    Mutation("ordering", "barrier left out", r"^\tbar\.sync\s+0;", ""),
    Mutation("ordering", "wait for copies left out", r"^\tcp\.async\.wait_group\s+\d+;", ""),
    Mutation(
        "ordering", "one copy less waited for", r"^\tcp\.async\.wait_group\s+(\d+);", _plus("\tcp.async.wait_group {};")
    ),
    Mutation(
        "ordering",
        "product not waited for",
        r"^\twgmma\.wait_group\.sync\.aligned\s+(\d+);",
        _plus("\twgmma.wait_group.sync.aligned {};"),
    ),
    Mutation("ordering", "proxy fence left out", r"^\tfence\.proxy\.async\.shared::cta;", ""),
    Mutation("ordering", "bulk wait left out", r"^\tcp\.async\.bulk\.wait_group\.read\s+0;", ""),
    Mutation("guards", "copied unconditionally", r"selp\.b32 (.*), 16, 0, (%p\d+)", r"selp.b32 \1, 16, 16, \2"),
    Mutation("guards", "stored by all", r"@%p\d+ st\.", "st."),
    Mutation("guards", "loaded by all", r"@%p\d+ ld\.global", "ld.global"),
    Mutation("guards", "added by all", r"@%p\d+ (atom|cp\.reduce)", r"\1"),
    Mutation("guards", "negated branch", r"@%p(\d+) bra", r"@!%p\1 bra"),
    Mutation("guards", "sum not begun with 0", r"(wgmma\.mma_async.*), 0, 1, 1", r"\1, 1, 1, 1"),
    Mutation("comparisons", "< for <=", r"setp\.le\.s32", "setp.lt.s32"),
    Mutation("comparisons", "<= for <", r"setp\.lt\.s32", "setp.le.s32"),
    Mutation("comparisons", "> for >=", r"setp\.ge\.s32", "setp.gt.s32"),
    Mutation("comparisons", ">= for >", r"setp\.gt\.s32", "setp.ge.s32"),
    Mutation("comparisons", "unsigned shift", r"\tshr\.s32", "\tshr.u32"),
)


class Mutant(NamedTuple):
    """Broken code: how, where, and the PTX."""

    mutation: Mutation
    line: int
    text: str
    ptx: str


def mutants(ptx: str, each: int, generator: random.Random, kind: str = "") -> Iterator[Mutant]:
    """Up to `each` mutants of PTX by each Mutation of a kind."""
    lines = ptx.split("\n")
    body = [i for i, line in enumerate(lines) if line.startswith(("\t", "@"))]
    for mutation in MUTATIONS:
        if kind not in f"{mutation.kind} {mutation.name}":
            continue
        places = [i for i in body if re.search(mutation.pattern, lines[i])]
        for i in generator.sample(places, min(each, len(places))):
            changed = [*lines[:i], re.sub(mutation.pattern, mutation.becomes, lines[i]), *lines[i + 1 :]]
            yield Mutant(mutation, i + 1, lines[i].strip(), "\n".join(changed))


def _dense(rows, keys, backend="triton", two_passes=False, **options):
    torch.manual_seed(0)
    sizes = (2, rows), (1, keys), (1, keys)
    query, key, value = (torch.randn(1, h, n, 64).bfloat16().requires_grad_() for h, n in sizes)
    torch.use_deterministic_algorithms(two_passes)
    try:
        out, lse = fa.attention(query, key, value, backend=backend, return_lse=True, **options)
        return [out, lse, *torch.autograd.grad(out, (query, key, value), torch.randn_like(out))]
    finally:
        torch.use_deterministic_algorithms(False)


def _decoded(lengths, capacity, rows=1, page=None, **options):
    torch.manual_seed(0)
    batch, lengths = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    query = torch.randn(batch, 4, rows, 64).bfloat16()
    pages = batch if page is None else batch * (capacity // page)
    caches = [torch.randn(pages, 1, page or capacity, 64).bfloat16() for _ in range(2)]
    if page is not None:
        options["block_table"] = torch.randperm(pages).view(batch, -1).int()
    out, lse = fa.attention_decode(query, *caches, cache_seqlens=lengths, return_lse=True, backend="triton", **options)
    return [out, lse]


# All take the same compiled kernel. Tiles have 64 or 128 rows and keys.
_EDGES = [
    dict(rows=rows, keys=keys, window=window)
    for rows, keys, window in (
        (200, 300, (130, 90)),
        (128, 128, (127, 127)),
        (129, 127, (128, 0)),
        (127, 129, (64, 63)),
        (257, 193, (63, 64)),
        (64, 64, (0, 0)),
        (1, 65, (64, 1)),
        (65, 1, (1, 64)),
        (192, 256, (127, 128)),
        (63, 320, (300, 300)),
    )
]
_LENGTHS = (17, 260, 0, 1), (64, 128, 127, 129), (63, 65, 320, 319), (2, 256, 192, 191)
CALLS: dict[str, list[Callable]] = {
    "forward": [functools.partial(_dense, **edge) for edge in _EDGES],
    "dkdv": [functools.partial(_dense, **edge) for edge in _EDGES],
    "dq": [functools.partial(_dense, two_passes=True, **edge) for edge in _EDGES],
    "decode": [
        functools.partial(_decoded, lengths, 320, rows=2, window=(left, 0))
        for lengths in _LENGTHS
        for left in (63, 300)
    ],
    "hopper": [functools.partial(_dense, backend="hopper", **edge) for edge in _EDGES],
}


def _computed(call, capability, edit=None):
    with device.gpu(capability, max_lanes=4096) as there:
        there.edit, there.most_steps = edit, STEPS
        return [x.detach().float() for x in call()], there.launches


class Judge:
    """Says of a mutant of a kernel which call shows it: what is right is computed once."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability
        self.right = {}

    def original(self):
        """The PTX of the kernel, as the first call has it."""
        _, launches = self._results(0)
        name = (
            "forward" if self.kernel == "hopper" else self.kernel
        )  # by the first launch: it is Hopper's that is named
        return next(launch.kernel.asm["ptx"] for launch in launches if launch.name == name)

    def _results(self, number):
        if number not in self.right:
            self.right[number] = _computed(CALLS[self.kernel][number], self.capability)
        return self.right[number]

    def seen(self, original, mutant):
        """Why a mutant is seen, or None."""
        try:
            for number, call in enumerate(CALLS[self.kernel]):
                expected, launches = self._results(number)
                if all(launch.kernel.asm["ptx"] != original for launch in launches):
                    continue
                why = self._seen_by(call, expected, lambda _, ptx: mutant.ptx if ptx == original else ptx)
                if why is not None:
                    return f"call {number}: {why}"
            return None
        finally:
            device.forget(mutant.ptx)

    def _seen_by(self, call, expected, edit):
        try:
            got, launches = _computed(call, self.capability, edit)
        except SEEN as error:
            return f"{type(error).__name__}: {str(error)[:80]}"
        found = sorted({kind for launch in launches for kind in launch.report.found if kind not in HARMLESS})
        if found:
            return "reported: " + ", ".join(found)
        for x, y in zip(got, expected, strict=True):
            if not torch.allclose(x, y, rtol=2e-2, atol=2e-3, equal_nan=True):
                return f"differs by {(x - y).abs().max().item():.2g}"
        return None


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="*", default=[80])
    parser.add_argument("--each", type=int, default=3, help="mutants of a kernel by each mutation")
    parser.add_argument("--kind", default="", help="part of the name of a mutation or of its kind")
    parser.add_argument("--kernels", nargs="+", default=list(CALLS), choices=CALLS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    survivors, tally = [], {}
    for capability in chosen.capabilities:
        for kernel in chosen.kernels:
            if kernel == "hopper" and capability != 90:
                continue
            judge = Judge(kernel, capability)
            original = judge.original()
            for mutant in mutants(original, chosen.each, random.Random(0), chosen.kind):
                began = time.monotonic()
                why = judge.seen(original, mutant)
                kinds = tally.setdefault(mutant.mutation.kind, [])
                kinds.append(why is not None)
                where = (
                    f"sm_{capability} {kernel:8} {mutant.mutation.name:26} line {mutant.line:5} {mutant.text[:60]:60}"
                )
                print(f"{where} {why or 'SURVIVED'} ({time.monotonic() - began:.1f} s)", flush=True)
                if why is None:
                    survivors.append(where)
    for kind, seen in tally.items():
        print(f"{kind}: {sum(seen)} of {len(seen)} seen")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main() > 0)
