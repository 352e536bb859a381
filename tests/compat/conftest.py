"""Fixtures of the tests of transformers' models."""

import warnings

import pytest

import fusedattn as fa
from fusedattn.compat import transformers as compat


@pytest.fixture
def told():
    """Return a function that returns our warnings so far; models that warned in earlier tests warn again."""
    judge = pytest.importorskip("fusedattn.compat._hf")
    before = set(judge._warned)
    judge._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(x.message) for x in caught if "fusedattn is not used" in str(x.message)]
    judge._warned.clear()
    judge._warned.update(before)


@pytest.fixture
def calls(monkeypatch):
    """Return a list of the keywords of each call of `fusedattn.attention` by transformers."""
    seen = []

    def attention(*args, **options):
        seen.append(options)
        return fa.attention(*args, **options)

    monkeypatch.setattr(compat, "attention", attention)
    return seen
