"""The features of attention packages, as found by asking them.    python -m tests.features [--report]

With --report it asks, and writes bench/results/features.csv, the page from it, and the table of the README.
"""

import argparse
import itertools
import pathlib

from . import cells
from .cells import COLUMNS, WORDS
from .rows import FEATURES

ROOT = pathlib.Path(__file__).parents[2]
PAGE = cells.KEPT.with_suffix(".md")
README = ROOT / "README.md"
BEGIN, END = "<!-- features: python -m tests.features --report -->\n\n", "\n\n"  # an empty line ends a table
SHORT = {cells.SDPA: "F.sdpa", cells.FLASH: "flash-attn 2"}
PROSE = """\
# What each package has

Made by `python -m tests.features --report`; the tests in `tests/features/` ask again, and fail where an answer differs.
Each cell is an answer to small calls in float32 on a CPU, {torch}, held to float64 by the rule of all tests
(`fusedattn/testing/tolerance.py`).

| word | means |
|---|---|
{words}

What memory a path takes is known of the path; an answer does not tell.

{table}

## What was asked

**fusedattn**: the backend that takes the call on a CPU. The tests ask the kernels too, in Triton's interpreter, and
want the same answer. No GPU was asked.

**F.scaled_dot_product_attention**: its fused kernel for CPUs, by `sdpa_kernel(SDPBackend.FLASH_ATTENTION)`, and where
that refuses, the formula, by `SDPBackend.MATH`. Its kernels for GPUs were not asked.

**FlexAttention**: a `score_mod` and a `mask_mod` of each feature alone, not compiled. One test has
`torch.compile(fullgraph=True)` make one kernel of all that is "forward", in one call, another of a cache in pages, and
both hold it to float64. On a CPU it refuses gradients, and an lse where it is compiled.

**flash-attn**: nothing was run, since it needs a GPU. "offered" is by its signatures, of version 2.8 and kept in
`fusedattn/compat/flash_attn.py`, or its sources, and so is "no". Where it is installed on a GPU, the tests ask it.

## What tells

The first line of what the package raised, what is wrong with its answer, or who says that it has it.

{reasons}
"""


def _table(names, rows):
    lines = ["| " + " | ".join(row) + " |" for row in (names, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def _words(kept):
    """[(feature, the words of its row)] in order."""
    return [(feature.name, tuple(kept[feature.name, name][0] for name in COLUMNS)) for feature in FEATURES]


def text(kept):
    """The page."""
    reasons = [
        (feature.name, name, cell.replace("|", "/"), why.replace("|", "/"))
        for (feature, name) in itertools.product(FEATURES, COLUMNS)
        for cell, why, _ in [kept[feature.name, name]]
        if why
    ]
    return PROSE.format(
        words="\n".join(f"| {word} | {means} |" for word, means in WORDS.items()),
        torch=kept[FEATURES[0].name, cells.SDPA][2],
        table=_table(("feature", *COLUMNS), [(name, *words) for name, words in _words(kept)]),
        reasons=_table(("feature", "package", "cell", "why"), reasons),
    )


def short(kept):
    """The table of the README: features with the same answers share a row, but for the least of them."""
    rows, names = {}, {feature.name: feature.short for feature in FEATURES}
    for name, words in _words(kept):
        if names[name]:
            rows.setdefault(words, []).append(names[name])
    names = ("feature", *(SHORT.get(name, name) for name in COLUMNS))
    return _table(names, [("; ".join(features), *words) for words, features in rows.items()])


def in_readme():
    """What the README has now."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0]


def main(arguments=None):
    words = argparse.ArgumentParser(prog="python -m tests.features", description=__doc__.splitlines()[0])
    words.add_argument("--report", action="store_true", help=f"ask, and write {PAGE.name} and the table of the README")
    if words.parse_args(arguments).report:
        cells.keep()
        kept = cells.kept()
        PAGE.write_text(text(kept))
        before, _, after = README.read_text().partition(BEGIN)
        README.write_text(before + BEGIN + short(kept) + END + after.partition(END)[2])
    else:
        print(text(cells.kept()))


if __name__ == "__main__":
    main()
