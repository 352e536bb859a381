"""Ways to break compiled code in one place: what each stands for, and the mutants of PTX that it makes."""

import pathlib
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fusedattn import kernels

_OURS = pathlib.Path(kernels.__file__).resolve().parent


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
    Mutation("ordering", "barrier left out", r"^\tbar(rier)?\.sync\s+\d+(, \d+)?;", ""),
    Mutation("ordering", "arrival left out", r"^\t@%p\d+ mbarrier\.arrive\.shared.*", ""),
    Mutation(
        "ordering",
        "mbarrier not waited for",
        r"^\tmbarrier\.try_wait.*complete, .*, (%r\d+);",
        r"\tsetp.eq.s32 complete, \1, \1;",
    ),
    Mutation("ordering", "copy left out", r"^\t(@%p\d+ )?cp\.async\.(cg|ca|bulk\.tensor).*", ""),
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
    """Broken code: how, where, and the PTX.

    source: the line of a kernel that it, or the predicate it takes, was compiled from, "file.py: text".
    part: "in 1" if it is in the second loop, "before 1" if it is between that and the first one.
    """

    mutation: Mutation
    line: int
    text: str
    source: str
    part: str
    ptx: str


def _sources(lines: list[str]) -> dict[str, list[str]]:
    """{name: lines} of the files of ours that PTX was compiled from."""
    paths = (pathlib.Path(found[1]) for line in lines if (found := re.match(r'\t\.file\t\d+ "(.*)"', line)))
    return {path.name: path.read_text().splitlines() for path in paths if path.resolve().is_relative_to(_OURS)}


def _source(lines: list[str], i: int, sources: dict[str, list[str]]) -> str:
    """The innermost line of ours that a line of PTX was compiled from, by the last .loc before it."""
    for line in reversed(lines[:i]):
        if line.startswith("\t.loc"):
            for name, number in re.findall(r"(\w+\.py):(\d+):", line):
                if name in sources and number != "0":
                    return f"{name}: {sources[name][int(number) - 1].strip()}"
    return ""


def _loops(lines: list[str]) -> list[range]:
    """The lines of each loop."""
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L__BB")}
    jumps = ((i, re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)) for i, line in enumerate(lines))
    return [range(labels[found[1]], i + 1) for i, found in jumps if found and labels[found[1]] < i]


def _part(loops: list[range], i: int) -> str:
    """Where a line stands among loops."""
    before = sum(loop.stop <= i for loop in loops)
    return f"in {before}" if any(i in loop for loop in loops) else f"before {before}"


def _decides(lines: list[str], i: int) -> int:
    """The line that sets the predicate that a line of PTX takes, or the line itself."""
    found = re.match(r"\t@(%p\d+)|\tselp\.b32.*(%p\d+);", lines[i])
    name = found and (found[1] or found[2])
    sets = (k for k in range(i - 1, -1, -1) if re.match(rf"\t(setp|and|or|not|mov)\S*\s+{name},", lines[k]))
    return next(sets, i) if name else i


def mutants(ptx: str, each: int, generator: random.Random, kind: str = "") -> Iterator[Mutant]:
    """Up to `each` mutants of PTX by each Mutation of a kind."""
    lines = ptx.split("\n")
    body = [i for i, line in enumerate(lines) if line.startswith(("\t", "@"))]
    sources, loops = _sources(lines), _loops(lines)
    for mutation in MUTATIONS:
        if kind not in f"{mutation.kind} {mutation.name}":
            continue
        places = [i for i in body if re.search(mutation.pattern, lines[i])]
        for i in generator.sample(places, min(each, len(places))):
            changed = [*lines[:i], re.sub(mutation.pattern, mutation.becomes, lines[i]), *lines[i + 1 :]]
            of, part = _source(lines, _decides(lines, i), sources), _part(loops, i)
            yield Mutant(mutation, i + 1, lines[i].strip(), of, part, "\n".join(changed))
