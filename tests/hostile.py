"""Wrong values of every kind for an argument; a function refuses one in one line that names it, or is right."""

import decimal
import math
import re

import torch

try:
    import numpy
except ImportError:
    numpy = None

SCALARS = {
    "str": "1",
    "bytes": b"1",
    "list": [1.0],
    "empty list": [],
    "tuple": (1, 2),
    "dict": {},
    "object": object(),
    "class": int,
    "None": None,
    "True": True,
    "False": False,
    "complex": 1j,
    "Decimal": decimal.Decimal(1),
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "0": 0,
    "-0.0": -0.0,
    "-1": -1,
    "1": 1,
    "1.5": 1.5,
    "1e39": 1e39,
    "tiny": 5e-324,
    "2**31": 2**31,
    "2**63": 2**63,
    "10**400": 10**400,
    "-10**400": -(10**400),
    "float tensor": torch.tensor(1.0),
    "bool tensor": torch.tensor(True),
    "int tensor": torch.tensor(1),
    "empty tensor": torch.empty(0),
    "rank 9": torch.ones((1,) * 9),
    "lazy": torch.nn.UninitializedParameter(),
    "dtype": torch.float32,
    "module": torch.nn.Identity(),
}
if numpy is not None:
    SCALARS |= {"numpy": numpy.ones(3), "numpy rank 0": numpy.array(1.0), "numpy int": numpy.int64(1)}
    SCALARS |= {"numpy bool": numpy.bool_(True)}


def tensors(like):
    """{kind: a tensor like another but for one thing}."""
    numbers, rows = like.detach().float(), list(like) if like.dim() and len(like) else [like.reshape(-1)]
    return {
        "int32": like.int(),
        "int64": like.long(),
        "uint8": like.to(torch.uint8),
        "bool": like.bool(),
        "half": like.half(),
        "double": like.double(),
        "float8": numbers.to(torch.float8_e4m3fn),
        "complex64": numbers.to(torch.complex64),
        "quantised": torch.quantize_per_tensor(numbers, 1.0, 0, torch.quint8),
        "sparse": like.to_sparse(),
        "mkldnn": numbers.contiguous().to_mkldnn(),
        "nested": torch.nested.nested_tensor(rows),
        "meta": like.to("meta"),
        "a row": rows[0],
        "rank + 1": like[None],
        "no rows": like[:0],
        "no columns": like[..., :0],
        "twice the rows": torch.cat([like, like]),
        "twice the columns": torch.cat([like, like], -1),
        "2**40 of one": like.reshape(-1)[:1].expand(2**40),
        "its list": like.tolist(),
    }


def wrong(value, but=()):
    """{kind: value} of all that may stand in the place of a value, of which some are right."""
    every = SCALARS | (tensors(value) if isinstance(value, torch.Tensor) else {})
    return {kind: x for kind, x in every.items() if kind not in but}


def with_numpys(right):
    """The kinds of value that are right: a number of NumPy is wherever one of Python is."""
    return right | {"numpy int"} if "1" in right and "True" not in right else right


def taken(function, arguments, name, value, beside=(), but=()):
    """{kind: result} of each kind of value that a function takes in the place of an argument.

    Args:
        arguments: a function that makes all arguments, of which one then is replaced.
        beside: other arguments that an error may name, which do not go with the one that is wrong.
    Raises: AssertionError for an error that does not say, in one line, which argument is wrong.
    """
    results = {}
    for kind, x in wrong(value, but).items():
        try:
            results[kind] = function(**arguments() | {name: x})
        except (ValueError, TypeError) as error:
            text = str(error)
            named = "|".join(map(re.escape, (name, *beside)))
            assert re.fullmatch(rf"(?:{named}): expected .+, got .+", text), (name, kind, text[:300])
        except Exception as error:
            raise AssertionError((name, kind, f"{type(error).__name__}: {error}"[:300])) from error
    return results
