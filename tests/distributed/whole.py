"""Methods of `fusedattn.distributed` as functions of the tensors of a whole sequence."""

import torch
import torch.distributed as dist

from fusedattn import distributed
from fusedattn.testing.compare import with_gradients

METHODS = ("ring_attention", "gather_attention", "ulysses_attention")
ROWS = dict(query=-2, key=-2, value=-2, mask=-2, bias=-2, key_mask=-1, query_mask=-1)  # the dimension of rows or keys


def by_shards(method, group=None, **balance):
    """Return a function like `attention` that shards its inputs; each rank gets the gradients of its rows."""

    def attend(query, key, value, **options):
        lacks = () if method == "ulysses_attention" else ("return_weights",)
        given = dict(query=query, key=key, value=value) | {name: x for name, x in options.items() if name not in lacks}
        for name, dim in ROWS.items():
            x = given.get(name)
            if x is not None and (x.shape[dim] > 1 or name not in ("mask", "bias")):
                given[name] = distributed.shard(x, dim, group=group, **balance)
        results = getattr(distributed, method)(**given, group=group, **balance)
        return [put_together(x, 2, group=group, **balance) for x in results]

    return attend


def put_together(x, dim, group=None, **balance):
    """Gather the shards x. Divide their gradients by the number of ranks, as all ranks compute the same loss."""
    if x.requires_grad:
        x.register_hook(lambda grad: None if grad is None else grad / dist.get_world_size(group))
    return distributed.unshard(x, dim, group=group, **balance)


def summed_gradients(function, tensors, options, grads="out and lse", group=None):
    """Return results and gradients of a function that `by_shards` made; gradients are summed over all ranks."""
    found = with_gradients(function, tensors, options, grads)
    for name in ("query", "key", "value", "bias"):
        if name in found:
            dist.all_reduce(found[name], group=group)
    return found


def largest(found, wanted):
    """Return the largest difference of tensors; equal NaN or infinities differ by 0, a single NaN gives NaN."""
    differences = [0.0]
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        differences.append(torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs()).sum().item())
    return torch.tensor(differences, dtype=torch.float64).max().item()  # Python's max ignores NaN
