"""The operators of torch.ops.fusedattn: schemas, checks, derivatives and implementations."""

from . import attention, cached

__all__ = ["attention", "cached"]
