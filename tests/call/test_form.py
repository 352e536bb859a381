"""A call in its one form: ranks, windows, alignment, scale and seeds as every backend takes them, and back."""

import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fusedattn.call import form, numbers
from fusedattn.call.form import Arguments, Call, hiding, lengths_of, normalise

SHAPES = {4: (2, 4, 3, 8), 3: (2, 3, 8), 2: (3, 8)}


def arguments(rank=4, **options):
    query = torch.randn(SHAPES[rank])
    key = torch.randn(*SHAPES[rank][:-2], 5, 8)
    if rank == 4:
        key = key[:, ::2]
    return Arguments(query, key, key + 1, **options)


@pytest.mark.parametrize("rank", SHAPES)
def test_a_call_has_four_dimensions_and_its_results_those_of_query(rank):
    a = arguments(rank)
    call = normalise(a)
    assert call.query.shape == {4: (2, 4, 3, 8), 3: (2, 1, 3, 8), 2: (1, 1, 3, 8)}[rank]
    for x, given in zip(call[:3], a[:3], strict=True):
        assert x.dim() == 4 and x.data_ptr() == given.data_ptr()
    out, lse = form.results(rank, call.query, call.query[..., 0], None)
    assert out.shape == a.query.shape and lse.shape == a.query.shape[:-1]
    assert torch.equal(form.results(rank, call.query, None), a.query)


def test_masks_and_what_belongs_to_heads_get_the_dimensions_they_lack():
    bools = torch.ones(3, 5, dtype=torch.bool)
    call = normalise(
        arguments(
            mask=bools,
            bias=torch.zeros(2, 1, 3, 5),
            key_mask=torch.ones(5, dtype=torch.bool),
            query_mask=torch.ones(2, 3, dtype=torch.bool),
            alibi_slopes=torch.zeros(4),
            sinks=torch.zeros(4),
        )
    )
    assert [x.shape for x in (call.mask, call.bias, call.key_mask, call.query_mask)] == [
        (1, 1, 3, 5),
        (2, 1, 3, 5),
        (1, 5),
        (2, 3),
    ]
    assert call.alibi_slopes.shape == call.sinks.shape == (1, 4)
    assert form.rank4(torch.zeros(2, 3, 5)).shape == (2, 1, 3, 5) and form.rank4(None) is form.rows(None) is None


@pytest.mark.parametrize(
    "options, left, right, top_left",
    [
        ({}, None, None, False),
        (dict(align="top_left"), None, None, False),  # of nothing it means nothing
        (dict(causal=True), None, 0, False),
        (dict(causal=True, align="top_left"), None, 0, True),
        (dict(window=(2, None)), 2, None, False),
        (dict(window=(None, 1), align="top_left"), None, 1, True),
        (dict(window=(2, 7), causal=True), 2, 0, False),
        (dict(window=(0, 0)), 0, 0, False),
        (dict(window=(2**40, 2**70)), 2**31, 2**31, False),
        (dict(alibi_slopes=torch.zeros(4), align="top_left"), None, None, True),
    ],
    ids=str,
)
def test_the_band(options, left, right, top_left):
    call = normalise(arguments(**options))
    assert (call.left, call.right, call.top_left) == (left, right, top_left)
    assert form.diagonal(call) == (0 if top_left else 2)


def test_numbers_are_floats_and_a_scale_is_there():
    call = normalise(arguments())
    assert call.scale == 8**-0.5 and call.softcap is None and call.dropout_p == 0.0 and call.seed is None
    call = normalise(arguments(scale=0, softcap=2))
    assert type(call.scale) is type(call.softcap) is float and (call.scale, call.softcap) == (0.0, 2.0)


def test_seeds():
    assert normalise(arguments(seed=5)).seed is None, "without dropout nothing is drawn"
    drawn = [normalise(arguments(dropout_p=0.5)).seed for _ in range(2)]
    assert not torch.equal(*drawn)
    for seed in (5, torch.tensor(5), torch.tensor([5])):
        found = normalise(arguments(dropout_p=0.5, seed=seed)).seed
        assert found.shape == (1,) and found.dtype == torch.int64 and found.item() == 5
    torch.manual_seed(0)
    first = form.seed_tensor(None, torch.device("cpu"))
    torch.manual_seed(0)
    assert torch.equal(first, form.seed_tensor(None, torch.device("cpu")))


def test_lengths_and_what_hides_pairs():
    mask, rows = torch.ones(1, 1, 3, 5, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)
    call = normalise(arguments(mask=mask, query_mask=rows))
    assert lengths_of(call) is None and hiding(call)[0] is mask and hiding(call)[2] is rows
    offsets = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    packed = call._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=3, max_seqlen_k=5)
    assert lengths_of(packed) == (*offsets, 3, 5, 3, 5) and hiding(packed) == (mask, None, None, None)


def test_deterministic_ends_with_its_with_and_is_of_one_thread():
    elsewhere = []
    with form.asking(deterministic=True):
        with form.asking(deterministic=False):
            assert not normalise(arguments()).deterministic
        thread = threading.Thread(target=lambda: elsewhere.append(form.asked.deterministic))
        thread.start(), thread.join()
        assert normalise(arguments()).deterministic
        with pytest.raises(RuntimeError), form.asking(deterministic=False):
            raise RuntimeError
        assert form.asked.deterministic
    assert not form.asked.deterministic and elsewhere == [False]


def test_autocast_casts_query_key_and_value_alone():
    a = arguments(bias=torch.zeros(3, 5))
    assert form.autocast(a) is a
    with torch.autocast("cpu", torch.bfloat16):
        cast = form.autocast(a)
        assert {x.dtype for x in cast[:3]} == {torch.bfloat16} and cast.bias.dtype == torch.float32
        wide = a._replace(query=a.query.double())
        assert form.autocast(wide).query.dtype == torch.float64
        assert form.autocast(a._replace(query=None)).key is a.key
    with torch.autocast("cpu", enabled=False):
        assert form.autocast(a) is a


def test_whether_somebody_may_want_a_derivative():
    x = torch.ones(2, requires_grad=True)
    assert form.differentiated([None, 1.0, x]) and not form.differentiated([x.detach(), "a"])
    with torch.no_grad():
        assert not form.differentiated([x])
    with torch.autograd.forward_ad.dual_level():
        assert form.differentiated([torch.autograd.forward_ad.make_dual(x.detach(), torch.ones(2))])


class Subclass(torch.Tensor):
    """A tensor that has its own way with operators."""


def test_what_lies_in_memory():
    x = torch.ones(2, 3)
    assert not form.in_memory([x, x.as_subclass(Subclass)]), "its operators are to be asked"
    assert not form.in_memory([torch._efficientzerotensor((2, 3))]), "a tensor of zeros has no address"
    assert form.in_memory([x, None, 2.0, "a", torch.nn.Parameter(x), x[:0]])
    for other in (torch._neg_view(x), x.to_sparse(), torch.nested.nested_tensor([x[0]], layout=torch.jagged)):
        assert not form.in_memory([x, other])
    assert form.plain([x]) and not form.watched()
    with FakeTensorMode():
        assert form.watched() and not form.plain([x])


def test_the_compiler_of_torch_2_10_can_trace_it():
    """It traces no isinstance of a union of types, and no property of a NamedTuple."""
    assert {type(kinds) for kinds in (numbers._INTS, numbers._NUMBERS)} == {tuple}
    assert not [name for name, x in vars(Call).items() if isinstance(x, property)]
