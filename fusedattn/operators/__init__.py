"""The operators of torch.ops.fusedattn: schemas, checks, derivatives and implementations."""

from . import attention, decode

__all__ = ["attention", "decode"]
