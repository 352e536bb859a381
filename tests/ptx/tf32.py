"""Eager PyTorch in float32 whose products are by tf32, which has 10 bits of a mantissa."""

import contextlib
from unittest import mock

import torch

from fusedattn.naive import formula


def _cut(x):
    """float32 without the 13 bits that tensor cores ignore."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


class _Product(torch.autograd.Function):
    """a @ b."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _cut(a) @ _cut(b)

    @staticmethod
    def backward(ctx, grad):
        a, b = (_cut(x) for x in ctx.saved_tensors)
        return _cut(grad) @ b.mT, a.mT @ _cut(grad)


def _scores(query, key, scale):
    return _Product.apply(query, key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT) * scale


def _sums(weights, value):
    return _Product.apply(weights, value.repeat_interleave(weights.shape[1] // value.shape[1], 1))


@contextlib.contextmanager
def eager_by_tf32():
    """Inside, `reference.eager` multiplies float32 by tf32, in the backward too."""
    with mock.patch.object(formula, "AS_WRITTEN", (_scores, _sums)):
        yield
