"""Drop-ins of torch's attention refuse what torch refuses, and little else: calls at random, right and wrong alike."""

import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedattn.compat.torch as compat
from fusedattn.compat import flash_attn

DTYPES = [torch.float32] * 50 + [torch.float64, torch.bfloat16, torch.int64]
MASKS = [torch.bool, torch.bool, torch.float32, torch.float32, torch.float64, torch.int64, torch.uint8]


def outcome(function):
    """None, or the error that a call raised."""
    try:
        function()
    except (ValueError, TypeError, RuntimeError, AssertionError, IndexError) as error:
        return error
    return None


def compare(theirs, ours, excused):
    """Both raise or neither does, unless excused; ours says which argument is wrong, and is caught where torch's is."""
    want, got = outcome(theirs), outcome(ours)
    assert got is None or isinstance(got, ValueError | TypeError), got
    assert excused or (got is None) == (want is None), (got, want)
    if got is not None:
        assert not isinstance(want, RuntimeError | AssertionError) or isinstance(got, type(want)), (got, want)
        assert str(got).partition(":")[0].replace("_", "").isalpha(), got
    return got is not None


X, LAYER = torch.zeros(2, 2, 4, 8), dict(embed_dim=8, num_heads=2)
CAUGHT = [
    (RuntimeError, lambda: compat.scaled_dot_product_attention(X, X[..., :4], X)),
    (RuntimeError, lambda: compat.scaled_dot_product_attention(X, X.double(), X)),
    (RuntimeError, lambda: compat.scaled_dot_product_attention(X, X, X, dropout_p=2.0)),
    (TypeError, lambda: compat.scaled_dot_product_attention([1], X, X)),
    (AssertionError, lambda: compat.MultiheadAttention(8, 3)),
    (ValueError, lambda: compat.MultiheadAttention(0, 3)),
    (AssertionError, lambda: compat.MultiheadAttention(**LAYER)(X[0, :, :, :4], X[0], X[0])),
    (RuntimeError, lambda: compat.MultiheadAttention(**LAYER)(X[0], X[0], X[0], attn_mask=torch.zeros(3, 3))),
    (AssertionError, lambda: compat.MultiheadAttention(**LAYER)(X[0], X[0], X[0], attn_mask=torch.zeros(4, 4).int())),
    (RuntimeError, lambda: compat.MultiheadAttention(**LAYER)(X[0], X[0], X[0], is_causal=True)),
    (RuntimeError, lambda: flash_attn.flash_attn_func(X, X[..., :4], X)),
    (RuntimeError, lambda: flash_attn.flash_attn_varlen_func(X[0], X[0], X[0], X, X, 1, 1)),
    (RuntimeError, lambda: flash_attn.flash_attn_with_kvcache(X, X, X.double())),
]


@pytest.mark.parametrize(("error", "call"), CAUGHT)
def test_programs_that_catch_their_errors_catch_ours(error, call):
    with pytest.raises(error) as raised:
        call()
    again = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(again, ValueError | TypeError) and str(again) == str(raised.value) and "expected" in str(again)


def test_a_compiled_program_catches_them_too():
    def attend(query, key):
        try:
            return compat.scaled_dot_product_attention(query, key, key)
        except RuntimeError:
            return query

    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, backend="eager")(X, X[..., :4]), X)


def near(pick, size):
    """A size, or now and then a wrong one."""
    return pick([size] * 20 + [1, size + 1])


def test_scaled_dot_product_attention():
    dice = random.Random(1)
    pick, raised = dice.choice, 0
    for _ in range(1500):
        leading = [pick([1, 2, 3]) for _ in range(pick([0, 1, 2, 2, 3]))]
        rows, keys = pick([1, 3]), pick([1, 4])

        def cut(sizes):
            return sizes[pick([0, 0, 0, 0, 1]) :]

        shapes = [
            leading + [rows, 4],
            cut([near(pick, n) for n in leading]) + [keys, pick([4] * 9 + [5])],
            cut([near(pick, n) for n in leading]) + [pick([keys] * 9 + [keys + 1]), pick([4, 6])],
        ]
        query, key, value = (torch.ones(shape).to(pick(DTYPES)) for shape in shapes)
        mask = None
        if pick([True, True, False]):
            shape = [pick([n, n, 1]) for n in (*leading, rows, keys)]
            shape = [near(pick, n) for n in shape] if pick([False] * 4 + [True]) else shape
            mask = torch.zeros(shape[pick([0, 0, len(shape) - 2]) :]).to(pick(MASKS))
        options = dict(attn_mask=mask, is_causal=pick([False, False, True]), enable_gqa=pick([False, False, True]))
        excused = (mask is not None and options["is_causal"]) or key.shape[-2] != value.shape[-2]
        raised += compare(
            lambda: F.scaled_dot_product_attention(query, key, value, **options),  # noqa: B023
            lambda: compat.scaled_dot_product_attention(query, key, value, **options),  # noqa: B023
            excused,
        )
    assert 300 < raised < 1200, raised


@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_multihead_attention():
    dice = random.Random(1)
    pick, raised = dice.choice, 0
    for _ in range(1000):
        options = pick([{}, dict(kdim=6, vdim=10), dict(add_bias_kv=True), dict(add_zero_attn=True)])
        options |= dict(batch_first=pick([True, False]))
        theirs, ours = nn.MultiheadAttention(8, 2, **options), compat.MultiheadAttention(8, 2, **options)
        batch, rows, keys, alone = pick([1, 2, 3]), pick([2, 3]), pick([2, 4]), pick([False, False, True])

        def drawn(length, width):
            n, length = near(pick, batch), near(pick, length)  # noqa: B023
            batched = [n, length, width] if ours.batch_first else [length, n, width]  # noqa: B023
            return torch.ones([length, width] if alone else batched).to(pick(DTYPES))  # noqa: B023

        inputs = drawn(rows, 8), drawn(keys, ours.kdim), drawn(keys, ours.vdim)
        shapes = [[rows, keys], [2 * batch, rows, keys], [2, rows, keys], [1, rows, keys], [keys, rows]]
        mask = torch.zeros(pick(shapes)).to(pick(MASKS)) if pick([True, False]) else None
        shapes = [[batch, keys], [keys], [1, keys], [keys, batch]]
        padding = torch.zeros(pick(shapes)).to(pick(MASKS)) if pick([True, False]) else None
        call = dict(attn_mask=mask, key_padding_mask=padding, need_weights=pick([True, False]))
        call |= dict(is_causal=pick([False, False, True]))
        # torch does not look at a mask that it has a hint for, and has no float64 mask beside float32.
        excused = call["is_causal"] or any(x is not None and x.dtype == torch.float64 for x in (mask, padding))
        raised += compare(lambda: theirs(*inputs, **call), lambda: ours(*inputs, **call), excused)  # noqa: B023
    assert 200 < raised < 900, raised
