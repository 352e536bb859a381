"""Random calls of functions like `attention`, as plain values from which tensors and options are drawn."""

from typing import NamedTuple

import torch

from ..cases import spoil
from .layouts import PLAIN, Layout, lay, shown

LOWEST = torch.finfo(torch.float32).min


class Pairs(NamedTuple):
    """A mask or a bias. axes: the dimensions of "bhij" that are not 1. keep: the share of visible pairs."""

    axes: str = "ij"
    keep: float = 0.7
    rank2: bool = False  # shape (Sq, Sk); axes are then a subset of "ij"
    hides: str = ""  # also hides "rows", "keys" or a "block" of pairs
    layout: Layout = PLAIN
    dtype: torch.dtype | None = None  # dtype of a bias; None is the query's
    size: float = 1.0  # standard deviation of a bias
    lowest: bool = False  # a bias of the lowest number of float32 instead of -inf

    __repr__ = shown


class Tokens(NamedTuple):
    """A key_mask or query_mask. kind: "own" for each batch, "shared" by all batches, or "rank 1"."""

    kind: str = "own"
    keep: float = 0.7
    layout: Layout = PLAIN

    __repr__ = shown


class Dense(NamedTuple):
    """One random call: its route (function), sizes, layouts, values, options and requested results."""

    route: str = "attention"
    B: int = 1
    Hkv: int = 1
    group: int = 1  # query heads that share a kv head
    Sq: int = 1
    Sk: int = 1
    D: int = 1
    Dv: int = 1
    lengths: tuple | None = None  # (rows, keys) of packed sequences
    dtype: torch.dtype = torch.float32
    values: int = 0  # the seed of the values
    spread: float = 1.0  # standard deviation of query and key
    alike: float = 0.0  # standard deviation of a vector added to all keys of a head, and of one added to all values
    query: Layout = PLAIN
    key: Layout = PLAIN
    value: Layout = PLAIN
    out: Layout = PLAIN  # layout of the incoming gradient
    mask: Pairs | None = None
    bias: Pairs | None = None
    key_mask: Tokens | None = None
    query_mask: Tokens | None = None
    planned: bool = False
    causal: bool = False
    window: tuple | None = None
    align: str = "bottom_right"
    scale: float | None = None
    softcap: float | None = None
    slopes: float | None = None  # standard deviation of the slopes
    slopes_dtype: torch.dtype = torch.float32
    own_slopes: bool = False
    sinks: str | None = None  # "normal", "none" (-inf), "some" or "large"
    sinks_dtype: torch.dtype | None = None  # None is the query's
    dropout: float = 0.0
    seed: int = 0
    seed_is_tensor: bool = False
    wanted: tuple = ()  # inputs with a gradient
    loss: tuple = ()  # results with an incoming gradient
    lse: bool = False
    weights: bool = False
    backend: str | None = None  # a third backend to try, which may refuse the call
    by_keyword: bool = True  # pass backend=, not `use_backend`
    again: bool = False  # call again with tensors elsewhere in memory

    __repr__ = shown

    @property
    def Hq(self):
        return self.Hkv * self.group

    @property
    def wide(self):
        return torch.promote_types(self.dtype, torch.float32)

    def draw(self, more=0):
        """Return ({"query", "key", "value", "out", "lse", "weights": tensor}, options) for draw number `more`."""
        dice = torch.Generator().manual_seed(self.values + 1000 * more)
        B, Hq, Sq, Sk = self.B, self.Hq, self.Sq, self.Sk

        def normal(*shape, size=1.0, dtype=self.dtype):
            return (torch.randn(shape, generator=dice) * size).to(dtype)

        kv = B, self.Hkv, Sk
        tensors = dict(query=normal(B, Hq, Sq, self.D, size=self.spread), key=normal(*kv, self.D, size=self.spread))
        tensors |= dict(value=normal(*kv, self.Dv), out=normal(B, Hq, Sq, self.Dv))
        tensors |= dict(lse=normal(B, Hq, Sq, dtype=self.wide), weights=normal(B, Hq, Sq, Sk))
        if self.alike:
            for name in ("key", "value"):
                tensors[name] += normal(B, self.Hkv, 1, tensors[name].shape[3]) * self.alike
        options = dict(causal=self.causal, window=self.window, align=self.align)
        if self.scale is not None:
            options["scale"] = self.scale
        if self.softcap is not None:
            options["softcap"] = self.softcap
        sizes = dict(b=B, h=Hq, i=Sq, j=Sk)

        def shape(pairs):
            whole = tuple(size if axis in pairs.axes else 1 for axis, size in sizes.items())
            return whole[2:] if pairs.rank2 else whole

        def seen(pairs):
            made = torch.rand(shape(pairs), generator=dice) < pairs.keep
            if "rows" in pairs.hides:
                made[..., 1::3, :] = False
            if "keys" in pairs.hides:
                made[..., : 2 * (made.shape[-1] // 3)] = False
            if "block" in pairs.hides:
                made[..., made.shape[-2] // 2 :, made.shape[-1] // 2 :] = False
            return made

        if self.mask is not None:
            options["mask"] = lay(seen(self.mask), self.mask.layout)
        if self.bias is not None:
            made = normal(*shape(self.bias), size=self.bias.size, dtype=self.bias.dtype or self.dtype)
            lowest = max(LOWEST, torch.finfo(made.dtype).min) if self.bias.lowest else float("-inf")
            options["bias"] = lay(made.masked_fill(~seen(self.bias), lowest), self.bias.layout)
        if self.slopes is not None:
            heads = (B, Hq) if self.own_slopes else (Hq,)
            options["alibi_slopes"] = normal(*heads, size=self.slopes, dtype=self.slopes_dtype)
        if self.sinks is not None:
            made = normal(Hq, size=30.0 if self.sinks == "large" else 1.0, dtype=self.sinks_dtype or self.dtype)
            hidden = torch.arange(Hq) % 2 == 0 if self.sinks == "some" else torch.tensor(self.sinks == "none")
            options["sinks"] = made.masked_fill(hidden, float("-inf"))
        if self.dropout:
            seed = torch.tensor([self.seed]) if self.seed_is_tensor else self.seed
            options |= dict(dropout_p=self.dropout, seed=seed)
        for name, tokens, length in (("key_mask", self.key_mask, Sk), ("query_mask", self.query_mask, Sq)):
            if tokens is not None:
                of = {"own": (B, length), "shared": (1, length), "rank 1": (length,)}[tokens.kind]
                options[name] = lay(torch.rand(of, generator=dice) < tokens.keep, tokens.layout)
                self._spoil(tensors, name, options[name].expand(B, length))
        for name in ("query", "key", "value", "out"):
            tensors[name] = lay(tensors[name], getattr(self, name))
        return tensors, options

    def _spoil(self, tensors, name, real):
        """Fill hidden elements and their incoming gradients with NaN and infinities, unless elements share memory."""
        names = ("key", "value") if name == "key_mask" else ("query", "out", "lse", "weights")
        for each in names:
            if each in ("lse", "weights") or not getattr(self, each).shared:
                tensors[each] = spoil(tensors[each], real)
