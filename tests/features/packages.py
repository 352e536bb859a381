"""The packages as their users call them, with the options of `fusedattn.attention`."""

import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedattn as fa

from .probes import PAGE, Lacks, Package


def _refuse(name, options):
    if options:
        raise Lacks(f"{name} has no argument for {', '.join(options)}")


def _pages(keys, values, page):
    """(pools of shuffled pages, block table) of keys and values (B, H, C, D), whose C is filled up."""
    batch, more = keys.shape[0], -keys.shape[2] % page
    count = batch * (keys.shape[2] + more) // page
    table = (
        torch.randperm(count, generator=torch.Generator().manual_seed(2)).view(batch, -1).to(keys.device, torch.int32)
    )
    pools = []
    for x in (keys, values):
        pages = F.pad(x, (0, 0, 0, more)).unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        pools.append(torch.empty_like(pages, memory_format=torch.contiguous_format))
        pools[-1][table.flatten().long()] = pages
    return *pools, table


def _new(x, lengths):
    """(what is new of keys (B, H, C, D), which is at a place of its own in each sequence; the rest with NaN there)."""
    place = lengths.long()[:, None, None, None].expand(-1, x.shape[1], 1, x.shape[3])
    return x.gather(2, place), x.scatter(2, place, math.nan)


def ours(backend=None, device="cpu"):
    def attend(*inputs, **options):
        found = fa.attention(*inputs, **options, backend=backend)
        return found if isinstance(found, tuple) else (found,)

    def packed(query, key, value, offsets):
        return fa.attention_varlen(query, key, value, offsets, offsets, backend=backend)

    def cached(query, keys, values, lengths):
        (new_key, keys), (new_value, values) = _new(keys, lengths), _new(values, lengths)
        *pools, table = _pages(keys, values, PAGE)
        new = dict(new_key=new_key, new_value=new_value)
        return fa.attention_decode(query, *pools, cache_seqlens=lengths, block_table=table, **new, backend=backend)

    return Package("fusedattn", attend, packed, cached, device=device)


def needs_mask(case):
    """Whether SDPA takes what a case asks for as a mask or bias of all pairs alone."""
    return case.window is not None or case.alibi is not None or (case.causal and case.Sq != case.Sk)


def _sdpa(query, key, value, *, mask=None, bias=None, key_mask=None, causal=False, window=None, alibi_slopes=None,
          dropout_p=0.0, return_lse=False, return_weights=False, **more):  # fmt: skip
    more |= dict(lse=True) if return_lse else {}
    _refuse("F.scaled_dot_product_attention", more | (dict(weights=True) if return_weights else {}))
    grouped, (rows, keys) = query.shape[1] != key.shape[1], (query.shape[2], key.shape[2])
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    given = bias if bias is not None else mask
    if key_mask is not None:
        given = key_mask.expand(query.shape[0], -1)[:, None, None]
    if window is not None:
        given = (distance <= window[0]) & (distance >= -window[1])
    if causal and rows != keys:
        given, causal = distance >= 0, False
    if alibi_slopes is not None:
        given = -alibi_slopes.reshape(-1, query.shape[1], 1, 1) * distance.abs()
    return (F.scaled_dot_product_attention(query, key, value, given, dropout_p, causal, enable_gqa=grouped),)


def _sdpa_packed(query, key, value, offsets):
    nested = (torch.nested.nested_tensor_from_jagged(x, offsets.long()).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*nested).transpose(1, 2).values()


SDPA = Package(
    "F.scaled_dot_product_attention",
    _sdpa,
    _sdpa_packed,
    paths=dict(
        yes=functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
        formula=functools.partial(sdpa_kernel, SDPBackend.MATH),
    ),
)


def _score(softcap, alibi_slopes, bias, rows, keys):
    """FlexAttention's function of scores."""
    parts = [x is not None for x in (softcap, alibi_slopes, bias)]

    def modify(score, b, h, row, column):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
            score = score - slope * (row + keys - rows - column).abs()
        return score if bias is None else score + bias[b, h, row, column]

    return modify if any(parts) else None


def _seen(mask, key_mask, causal, window, documents, shape):
    """FlexAttention's block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, rows, keys = shape
    conditions = [
        mask is not None and (lambda b, h, row, column: mask[b, h, row, column]),
        key_mask is not None and (lambda b, h, row, column: key_mask[b, column]),
        causal and (lambda b, h, row, column: column <= row + keys - rows),
        window is not None and (lambda b, h, row, column: column >= row + keys - rows - window[0]),
        window is not None and (lambda b, h, row, column: column <= row + keys - rows + window[1]),
        documents is not None and (lambda b, h, row, column: documents[row] == documents[column]),
    ]
    if not (conditions := [x for x in conditions if x]):
        return None

    def seen(b, h, row, column):
        return functools.reduce(lambda x, y: x & y, (condition(b, h, row, column) for condition in conditions))

    return create_block_mask(seen, batch, heads, rows, keys, device="cpu")


def flex(compiled=None):
    """FlexAttention as it is; by `compiled`, what torch.compile made of it."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    function = compiled or flex_attention

    def attend(query, key, value, *, mask=None, bias=None, key_mask=None, causal=False, window=None, softcap=None,
               alibi_slopes=None, documents=None, return_lse=False, return_weights=False, **more):  # fmt: skip
        _refuse("FlexAttention", more | (dict(weights=True) if return_weights else {}))
        if return_lse and compiled is None:
            raise Lacks("compiled for a CPU it returns no lse")  # test_features.py asks
        shape = batch, heads, rows, keys = *query.shape[:3], key.shape[2]
        mask, bias = (None if x is None else x.expand(shape) for x in (mask, bias))
        key_mask = None if key_mask is None else key_mask.expand(batch, keys)
        modify = _score(softcap, alibi_slopes, bias, rows, keys)
        block_mask = _seen(mask, key_mask, causal, window, documents, shape)
        aux = AuxRequest(lse=True) if return_lse else None
        found = function(query, key, value, modify, block_mask, enable_gqa=heads != key.shape[1], return_aux=aux)
        return (found[0], found[1].lse) if return_lse else (found,)

    def packed(query, key, value, offsets):
        documents = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        whole = (x.transpose(0, 1)[None] for x in (query, key, value))
        return attend(*whole, documents=documents)[0][0].transpose(0, 1)

    return Package("FlexAttention", attend, packed, functools.partial(_flex_cached, function))


def _flex_cached(function, query, keys, values, lengths):
    """By the class for pages that is beside FlexAttention, among what is experimental."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, noop_mask

    batch, heads, capacity, dim = keys.shape
    count = -(-capacity // PAGE)
    paged = PagedAttention(batch * count, PAGE, batch, device="cpu")
    pools = [x.new_zeros(1, heads, batch * count * PAGE, x.shape[3]) for x in (keys, values)]
    each = torch.arange(batch)
    for b in each:
        paged.reserve(b[None], torch.tensor([capacity]))
    (new_key, keys), (new_value, values) = _new(keys, lengths), _new(values, lengths)
    seen = torch.arange(capacity) < lengths[:, None]
    keys, values = (torch.where(seen[:, None, :, None], x, 0) for x in (keys, values))
    paged.assign(each, torch.arange(capacity).expand(batch, -1), keys, values, *pools)
    paged.assign(each, lengths.long()[:, None], new_key, new_value, *pools)
    logical = create_block_mask(noop_mask, batch, None, 1, count * PAGE, device="cpu", BLOCK_SIZE=(PAGE, PAGE))
    mask = paged.convert_logical_block_mask(logical, kv_len=lengths + 1)
    return function(query, *pools, block_mask=mask, enable_gqa=query.shape[1] != heads)


def flash_attn():
    """flash-attn, if it is here and has a GPU; else None."""
    if importlib.util.find_spec("flash_attn") is None or not torch.cuda.is_available():
        return None
    import flash_attn as package

    def attend(query, key, value, *, causal=False, window=None, softcap=None, alibi_slopes=None, dropout_p=0.0,
               return_lse=False, return_weights=False, **more):  # fmt: skip
        _refuse("flash-attn", more | (dict(weights=True) if return_weights else {}))
        options = dict(causal=causal, window_size=window or (-1, -1), softcap=softcap or 0.0, dropout_p=dropout_p)
        slopes = None if alibi_slopes is None else alibi_slopes.float()
        inputs = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, _ = package.flash_attn_func(*inputs, **options, alibi_slopes=slopes, return_attn_probs=True)
        return (out.transpose(1, 2), lse) if return_lse else (out.transpose(1, 2),)

    def packed(query, key, value, offsets):
        most = int(offsets.diff().max())
        return package.flash_attn_varlen_func(query, key, value, offsets, offsets, most, most)

    def cached(query, keys, values, lengths):
        (new_key, keys), (new_value, values) = _new(keys, lengths), _new(values, lengths)
        *pools, table = _pages(keys.nan_to_num(), values.nan_to_num(), 256)  # its pages are a multiple of that
        query, *rest = (x.transpose(1, 2).contiguous() for x in (query, *pools, new_key, new_value))
        out = package.flash_attn_with_kvcache(query, *rest, cache_seqlens=lengths, block_table=table)
        return out.transpose(1, 2)

    return Package("flash-attn", attend, packed, cached, dtype=torch.bfloat16, device="cuda")
