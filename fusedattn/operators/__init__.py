"""The operators of torch.ops.fusedattn: schemas, checks, derivatives and implementations."""
