"""Samples of parameters for `make test`; `make test-all` runs all."""

import itertools

import pytest


def matrix(*parameters):
    """Leave parameters to `make test-all`."""
    return [pytest.param(*each.values, marks=(*each.marks, pytest.mark.matrix), id=each.id) for each in parameters]


def one_in(n, parameters):
    """Leave all parameters but the first and each n-th to `make test-all`."""
    return [x for i, each in enumerate(parameters) for x in ([each] if i % n == 0 else matrix(each))]


def planted(mistakes):
    """Mark two of three planted mistakes, so that `make test-all` leaves them out."""
    return [
        pytest.param(*each.values, marks=(*each.marks, *([pytest.mark.planted] if n % 3 else [])), id=each.id)
        for n, each in enumerate(mistakes)
    ]


def named(values):
    """Return a parameter of each case, by its name."""
    return [pytest.param(each, id=each.name) for each in values]


def product(*axes):
    """Return a parameter of each combination of values, which have names or are names."""
    return [
        pytest.param(*values, id="-".join(getattr(each, "name", str(each)) for each in values))
        for values in itertools.product(*axes)
    ]


def checkered(*axes):
    """Return a parameter of each combination; `make test` runs every second one, as on a chess board."""
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        x for at, each in zip(places, product(*axes), strict=True) for x in (matrix(each) if sum(at) % 2 else [each])
    ]
