"""The examples of the docstrings run, each public function and class has one, and the reference prints them well."""

import doctest
import inspect

import pytest
import torch

import fusedattn as fa
from docs import docstrings

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


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_a_sentence_first(name):
    first = inspect.getdoc(PUBLIC[name]).splitlines()[0]
    assert first.endswith((".", "`.")), first


STYLE = """Do a thing, of x < y.

    >>> do([1], 2)  # doctest: +SKIP
    [3]

- An item,
  of two lines.
- Another.

Args:
    x, y: tensors (B, S), as in `shard`. z: a number, 2 * x[0]
        or None.
    All others: as in `fusedattn.attention`.
Returns: output; with z
    a tuple (output[, z]).
After it.
"""

MARKDOWN = r"""Do a thing, of x &lt; y.

```pycon
>>> do([1], 2)
[3]
```

- An item, of two lines.
- Another.

**Arguments:**

- `x`, `y`: tensors (B, S), as in [`shard`][fusedattn.distributed.shard].
- `z`: a number, 2 \* x\[0\] or None.
- All others: as in [`fusedattn.attention`][fusedattn.attention].

**Returns:** output; with z a tuple (output\[, z\]).

After it.
"""


def test_the_style_of_the_house_becomes_markdown():
    known = {"shard": "fusedattn.distributed.shard", "fusedattn.attention": "fusedattn.attention"}
    assert docstrings.markdown(STYLE, ("x", "y", "z"), known.get) == MARKDOWN


def test_an_example_that_is_all_there_is_stays_one():
    assert docstrings.markdown("Do it.\n\n>>> do()\n3", ()) == "Do it.\n\n```pycon\n>>> do()\n3\n```\n"


def test_no_part_of_a_docstring_is_lost():
    """Every word of each docstring is in what the reference prints."""
    for name, documented in PUBLIC.items():
        source = inspect.getdoc(documented)
        printed = docstrings.markdown(source, ())
        for sign, written in (("\\", ""), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"), ("Arguments:", "Args:")):
            printed = printed.replace(sign, written)
        assert source.count(">>>") == printed.count("\n>>>"), name
        for word in source.split():
            assert word in printed or word in ("doctest:", "+SKIP", "#"), f"{name}: {word}"
