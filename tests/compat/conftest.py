"""What the tests of transformers' models share: the warnings of ours, and our calls."""

import warnings

import pytest

import fusedattn as fa
from fusedattn.compat import transformers as compat


@pytest.fixture
def told():
    """The warnings of ours: each test is the first to see a model."""
    judge = pytest.importorskip("fusedattn.compat._hf")
    before = set(judge._warned)
    judge._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield Told(caught)
    judge._warned.clear()
    judge._warned.update(before)


class Told:
    def __init__(self, caught):
        self.caught = caught

    def __call__(self):
        return [str(each.message) for each in self.caught if "fusedattn is not used" in str(each.message)]


@pytest.fixture
def calls(monkeypatch):
    """The keywords of each call of `fusedattn.attention` by way of transformers."""
    seen = []

    def attention(*args, **options):
        seen.append(options)
        return fa.attention(*args, **options)

    monkeypatch.setattr(compat, "attention", attention)
    return seen
