"""The examples of the docstrings run, each public function and class has one, and the reference can read them."""

import doctest
import inspect
import itertools
import re

import pytest
import torch

import fusedattn as fa

from .test_pages import alone, public  # noqa: F401 - a fixture

# Without an example: what other functions return, what transformers calls, and functions whose docstring names another.
BARE = {"fusedattn.Plan", "fusedattn.Explanation", "fusedattn.compat.transformers.fusedattn_forward"}
BARE |= {f"fusedattn.reference.{name}" for name in ("attention", "attention_varlen", "attention_decode")}
PUBLIC = {name: x for name, x in public().items() if not inspect.ismodule(x)} | {
    "fusedattn.compat.flash_attn": fa.compat.flash_attn,
    "fusedattn.layers.from_config": fa.layers.FeedForward.from_config,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in BARE])
def test_its_example_runs(name, alone):  # noqa: F811
    documented = PUBLIC[name]
    if "transformers" in name:
        pytest.importorskip("transformers")
    if "plot" in name:
        pytest.importorskip("matplotlib")
    names = dict(torch=torch, fusedattn=fa)
    names |= vars(fa.compat.flash_attn) if name.startswith("fusedattn.compat.flash_attn") else {}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(documented), names, name, None, None)
    assert example.examples, "no example"
    printed = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert not printed, "".join(printed)


METHODS = {f"{name}.forward": x.forward for name, x in PUBLIC.items() if hasattr(x, "forward")}


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_the_reference_reads_its_sections(name):
    """In Google style a section has a blank line above, a head that stands alone, and an indented body of items."""
    lines = ["", *inspect.getdoc((PUBLIC | METHODS)[name]).splitlines(), ""]
    sections = {n: line for n, line in enumerate(lines) if re.match("(Args|Returns|Raises|Examples):", line)}
    for n, head in sections.items():
        assert head.endswith(":") and not lines[n - 1] and lines[n + 1].startswith("    "), head
        body = itertools.takewhile(lambda line: not line or line.startswith("    "), lines[n + 1 :])
        items = [line for line in body if re.match(r"    \S", line)]
        if head in ("Args:", "Raises:"):
            assert all(re.match(r"    [*\w., ()]+: ", item) for item in items), items
    assert all(n - 1 in sections or line.startswith("    ") for n, line in enumerate(lines) if ">>>" in line)
