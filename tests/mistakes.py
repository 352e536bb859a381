"""Mistakes of callers, as tuples (argument that the error names, class of the error, changed arguments)."""

import pytest
import torch

_WRONG_DTYPES = {torch.bool: torch.float32, torch.int32: torch.int64, torch.int64: torch.int32}


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def ones(*shape):
    return torch.ones(shape)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def longs(*values):
    return torch.tensor(values)


def wrong(name, error=ValueError, **changed):
    return name, error, changed


def of_types(arguments, by_name=False):
    """Return mistakes that give each tensor another dtype or another device.

    by_name: True if an operator is called by name. Otherwise there are also a list and a sparse tensor, which torch
        itself refuses for operators.
    """
    rows, tensors = [], {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    for n, (name, x) in enumerate(tensors.items()):
        other = x.to(_WRONG_DTYPES.get(x.dtype, torch.int32))
        rows += of_values({name: [other] if by_name else [other, [1.0], x.to_sparse()]}, TypeError)
        if name != "query" and (n > 0 or len(tensors) == 1):  # devices of other tensors are compared with this tensor's
            rows.append(wrong(name, **{name: x.to("meta")}))
    return rows


def of_shapes(arguments, shapes):
    """Return mistakes that give tensors wrong shapes, from {argument: wrong shapes}."""
    return of_values({name: [arguments[name].new_ones(x) for x in several] for name, several in shapes.items()})


def of_values(values, error=ValueError):
    """Return mistakes that give arguments wrong values, from {argument: wrong values}."""
    return [wrong(name, error, **{name: value}) for name, several in values.items() for value in several]


def assert_named(function, arguments, row):
    """Assert that a mistake raises its error, in one line that names the argument, and that nothing is written."""
    name, error, changed = row
    given = arguments | changed
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor) and not x.is_meta]
    before = [x.clone() for x in tensors]
    with pytest.raises(error) as raised:
        function(**given)
    message = str(raised.value)
    shapes = [(key, x.shape if isinstance(x, torch.Tensor) else x) for key, x in changed.items()]
    said = message.startswith(f"{name}: expected ") and ", got " in message and "\n" not in message
    assert said, f"{name}, {shapes}: {message}"
    assert all(torch.equal(x.to_dense(), was.to_dense()) for x, was in zip(tensors, before, strict=True))
