"""What the tests of fusedattn.distributed call: a method on shards, and one process on the whole, in float64 or not."""

from typing import Any, NamedTuple

import torch

import fusedattn as fa
from fusedattn import distributed

HEADS, KEY_HEADS = 4, 2
LENGTHS = 0, 9, 1, 14, 13  # of documents: with T = 37 no shard ends where one does


class Case(NamedTuple):
    """A call: sizes, options of attention by name, and what is drawn for those that are tensors."""

    name: str
    options: dict[str, Any] = {}
    tensors: tuple[str, ...] = ()
    rows: int = 37
    keys: int | None = None
    heads: tuple[int, int] = (HEADS, KEY_HEADS)
    columns: tuple[int, int] = (8, 6)
    batch: int = 2
    spread: float = 1.0

    def draw(self, dtype):
        """({name: tensor of the whole}, {name: its dimension that is cut, or None}) of inputs and options."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        (heads, key_heads), (d, dv), batch = self.heads, self.columns, self.batch
        rows, keys = self.rows, self.rows if self.keys is None else self.keys
        made = dict(
            query=(normal(batch, heads, rows, d) * self.spread, 2),
            key=(normal(batch, key_heads, keys, d), 2),
            value=(normal(batch, key_heads, keys, dv), 2),
        )
        seen = torch.rand(batch, 1, rows, keys, generator=generator) > 0.3
        everything = dict(
            key_mask=(torch.rand(batch, keys, generator=generator) > 0.3, 1),
            query_mask=(torch.rand(batch, rows, generator=generator) > 0.3, 1),
            mask=(seen, 2),
            head_mask=(torch.rand(1, heads, rows, keys, generator=generator) > 0.3, 2),
            bias=(normal(batch, heads, rows, keys), 2),
            shared_bias=(normal(1, 1, rows, keys), 2),
            key_bias=(normal(batch, heads, 1, keys), None),
            alibi_slopes=(torch.rand(heads, generator=generator, dtype=torch.float64), None),
            own_slopes=(torch.rand(batch, heads, generator=generator, dtype=torch.float64), None),
            sinks=(normal(heads), None),
        )
        made |= {_OPTION.get(name, name): everything[name] for name in self.tensors}
        tensors = {
            name: x if x.dtype == torch.bool else x.to(dtype if name in ("query", "key", "value") else wide(dtype))
            for name, (x, _) in made.items()
        }
        return tensors, {name: dim for name, (_, dim) in made.items()}


_OPTION = dict(head_mask="mask", shared_bias="bias", key_bias="bias", own_slopes="alibi_slopes")


def wide(dtype):
    """The dtype of options and of lse."""
    return torch.promote_types(dtype, torch.float32)


def leaves(tensors):
    """Each tensor, of which the floating ones want a gradient."""
    return {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}


def run(function, tensors, incoming, options):
    """{name: output, lse and gradients of tensors} of a function of tensors and options."""
    inputs = leaves(tensors)
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    rest = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
    out, lse = function(query, key, value, **rest, **options, return_lse=True)
    torch.autograd.backward((out, lse), incoming)
    grads = {f"grad of {name}": x.grad for name, x in inputs.items() if x.requires_grad}
    return dict(out=out.detach(), lse=lse.detach()) | grads


def whole_and_shard(case, method, dtype, balance=None, group=None, backend=None, reference="naive"):
    """({name: of one process, cut}, {name: of the shards}) of a case by a method of `distributed`."""
    tensors, dims = case.draw(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (*tensors["query"].shape[:3], tensors["value"].shape[3])
    grad_out = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    grad_lse = torch.randn(shape[:3], generator=generator, dtype=torch.float64).to(wide(dtype))
    more = {} if balance is None else dict(balance=balance)

    def cut(x, dim):
        return x if dim is None else distributed.shard(x, dim, group=group, **more)

    wanted = run(fa.attention, tensors, (grad_out, grad_lse), case.options | dict(backend=reference))
    shards = {name: cut(x, dims[name]) for name, x in tensors.items()}
    options = case.options | more | dict(group=group) | ({} if backend is None else dict(backend=backend))
    found = run(getattr(distributed, method), shards, (cut(grad_out, 2), cut(grad_lse, 2)), options)
    places = dict(out=2, lse=2) | {f"grad of {name}": dim for name, dim in dims.items()}
    return {name: cut(x, places[name]) for name, x in wanted.items()}, found, places
