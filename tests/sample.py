"""Samples of test parameters: `make test` runs them, `make test-all` runs all parameters."""

import itertools

import pytest


def matrix(*parameters):
    """Mark test parameters so that only `make test-all` runs them."""
    return [pytest.param(*each.values, marks=(*each.marks, pytest.mark.matrix), id=each.id) for each in parameters]


def one_in(n, parameters):
    """Mark all parameters except the first and each n-th, so that only `make test-all` runs them."""
    return [x for i, each in enumerate(parameters) for x in ([each] if i % n == 0 else matrix(each))]


def planted(mistakes):
    """Mark two of three planted mistakes as `planted`, so that `make test-all` leaves them out."""
    return [
        pytest.param(*each.values, marks=(*each.marks, *([pytest.mark.planted] if n % 3 else [])), id=each.id)
        for n, each in enumerate(mistakes)
    ]


def named(values):
    return [pytest.param(each, id=each.name) for each in values]


def product(*axes):
    """Return a test parameter for each combination of values; its id joins the values' names."""
    return [
        pytest.param(*values, id="-".join(getattr(each, "name", str(each)) for each in values))
        for values in itertools.product(*axes)
    ]


def checkered(*axes):
    """Return a test parameter for each combination; `make test` runs every second one, as on a chess board."""
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        x for at, each in zip(places, product(*axes), strict=True) for x in (matrix(each) if sum(at) % 2 else [each])
    ]
