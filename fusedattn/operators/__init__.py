"""The operators of torch.ops.fusedattn: schemas, checks, derivatives and implementations."""

from . import attention, cached, flops

__all__ = ["attention", "cached", "flops"]

flops.register_when_imported()  # of the operators that the first two have made
