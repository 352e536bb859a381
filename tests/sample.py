"""Samples of parameters for `make test`; `make test-all` runs all of them."""

import itertools

import pytest


def matrix(*parameters):
    """Parameters that `make test` leaves out."""
    return [pytest.param(*each.values, marks=(*each.marks, pytest.mark.matrix), id=each.id) for each in parameters]


def one_in(n, parameters):
    """`make test` runs the first of these parameters, and from there each n-th."""
    return [x for i, each in enumerate(parameters) for x in ([each] if i % n == 0 else matrix(each))]


def planted(mistakes):
    """Mark two of three parameters, each a mistake that tests must see: `make test-all` leaves these out."""
    return [
        pytest.param(*each.values, marks=(*each.marks, *([pytest.mark.planted] if n % 3 else [])), id=each.id)
        for n, each in enumerate(mistakes)
    ]


def named(values):
    """A parameter of each of some cases, by its name."""
    return [pytest.param(each, id=each.name) for each in values]


def product(*axes):
    """A parameter of each combination of values that have a name, or are one."""
    return [
        pytest.param(*values, id="-".join(getattr(each, "name", str(each)) for each in values))
        for values in itertools.product(*axes)
    ]


def checkered(*axes):
    """A parameter of each combination; `make test` runs those of one colour, as on a chess board."""
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        x for at, each in zip(places, product(*axes), strict=True) for x in (matrix(each) if sum(at) % 2 else [each])
    ]
