"""Tests of the kernels for caches: split sequences, unchecked lengths and pages, and the operators inside PyTorch."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")
from triton.runtime.errors import OutOfResources

import fusedattn as fa
from fusedattn.launch import run

from .. import sample
from ..caches import EVERYTHING, Cached, bits, in_float64, touched, widest
from ..close import assert_as_good, assert_like
from ..inside import cache_call, same

PACKED = Cached("packed", page=16, Hq=2, Hkv=1, Sq=2, lengths=(0, 17, 44), new=2, causal=True, half=3, sinks=True)


def attend(arguments, **options):
    return fa.attention_decode(**arguments, **options, return_lse=True, backend="triton")


def naively(arguments):
    copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return fa.attention_decode(**copies, return_lse=True, backend="naive")


@pytest.mark.parametrize("case", [PACKED, EVERYTHING], ids=lambda case: case.name)
def test_however_many_share_a_sequence_the_answer_is_the_same(case, device, poison, tiles, launched):
    case = case._replace(dtype=widest(device), lengths=(0, 44))
    for n in (1, 2, 5):
        tiles.splits(n)
        launched.clear()
        assert_like(attend(case.draw(device)), naively, case.draw(device))
        assert [name for name, _ in launched] == ["append", "decode_16", *["combine"] * (n > 1)]


@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_not_a_number_is_not_hidden(splits, device, tiles):
    tiles.splits(splits)
    case = Cached("wrong", lengths=(44, 44, 44))
    arguments = case.draw(device)
    arguments["key_cache"][0, 0, 3, 1] = float("nan")
    arguments["key_cache"][1, 1, 40, 1] = float("inf")
    arguments["query"][2, 3] = float("nan")
    out, lse = attend(arguments)
    naive = fa.attention_decode(**arguments, return_lse=True, backend="naive")
    assert not lse[0, :2].isfinite().any() and lse[0, 2:].isfinite().all()
    for got, right in zip((out, lse), naive, strict=True):
        assert torch.equal(got.isfinite(), right.isfinite())


def test_how_long_caches_are_is_no_part_of_what_is_compiled(device, tiles, launched):
    """Caches of any capacity use the same compiled kernels, also with a page table of one page per sequence."""
    tiles.splits(1)
    for page in (None, 1):
        found = []
        for capacity in (20, 48, 64):
            launched.clear()
            attend(Cached("room", C=capacity, page=page and capacity, lengths=(17, 11), new=2).draw(device))
            found.append([{key: x for key, x in y.items() if key.isupper() and key not in "QKV"} for _, y in launched])
        assert found[0] == found[1] == found[2] and [name for name, _ in launched] == ["append", "decode_16"]


def test_a_tile_that_does_not_fit_leaves_nothing_behind(device, tiles, monkeypatch):
    """After a tile that does not fit, the next tile is right, which may split the keys among fewer or more programs."""
    case, run_kernel = PACKED._replace(lengths=(0, 44)), run.run_kernel
    names, two = [], [tiles.table.Tile(16, keys, 4, 1) for keys in (32, 16)]
    tiles.choose(lambda found: two if found[0].rows == 16 and found[0].keys is not None else found)

    def small(name, programs, arguments, *rest, **options):
        if arguments.get("BLOCK_N") == 32:
            raise OutOfResources(1, 0, "shared memory")
        names.append(name)
        return run_kernel(name, programs, arguments, *rest, **options)

    monkeypatch.setattr(run, "run_kernel", small)
    for first, second in ((2, 1), (1, 2)):
        # 48 keys are two blocks of the first tile, and three of the second: `of` gives the programs for each.
        tiles.splits(lambda _, blocks, __, of={2: first, 3: second}: of[blocks])
        names.clear()
        assert_like(attend(case.draw(device)), naively, case.draw(device))
        assert names == ["append", "decode_16", *(["combine"] if second > 1 else [])]


def test_values_that_are_columns_of_the_keys_are_not_loaded(device, launched):
    case = Cached("shared", Hq=2, Hkv=1, shared=True, lengths=(44,))
    calls = (576, 512, True, False), (576, 512, False, True), (64, 48, True, False), (64, 32, True, True)
    for D, Dv, shared, loaded in calls:
        launched.clear()
        attend(case._replace(D=D, Dv=Dv, shared=shared).draw(device))
        assert (launched[0][1]["cache"].V is not None) == loaded, (D, Dv)


def test_what_kernels_do_not_take_is_said(device):
    arguments = Cached("wide", D=577, lengths=(3,)).draw(device)
    with pytest.raises(NotImplementedError, match="'triton' cannot take this call: the head dimension of query is 577"):
        attend(arguments)
    tall, cache = (torch.empty(1, device=device).half().expand(2**15, heads, 1, 16) for heads in (2**16, 1))
    lengths = torch.ones(2**15, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match=r"2\*\*31 programs"):
        fa.attention_decode(tall, cache, cache, cache_seqlens=lengths, backend="triton")


WRONG = {
    "lengths": dict(cache_seqlens=[-5, 17, 2**31 - 1]),
    "new past the capacity": dict(cache_seqlens=[47, 48, 46]),
    "pages": dict(table=[[-1, 2**31 - 1, 5], [4, -(2**31), 10**6], [7, 3, 2]]),
}


@pytest.mark.parametrize("wrong, page", sample.checkered(WRONG, [None, 16, 12]))
def test_what_nobody_checked_is_read_and_written_inside(wrong, page, device, unchecked):
    """Kernels and the naive path clamp wrong lengths and page numbers alike; calls on a GPU do not check them."""
    if "table" in WRONG[wrong] and page is None:
        pytest.skip("there are no pages")
    case = Cached("wrong", Hq=2, lengths=(0, 17, 44), page=page, new=4, Sq=2, causal=True, half=3, strided=True)
    found, case = [], case._replace(dtype=widest(device))
    for backend in ("exact", "naive", "triton", *(["cpu"] if device == "cpu" else [])):
        arguments = case.draw(device)
        names = dict.fromkeys(("key_cache", "value_cache"))
        for name in names:  # no NaN: clamped page numbers lead to other sequences
            arguments[name].copy_(torch.randn(arguments[name].shape, generator=torch.Generator().manual_seed(3)))
        lengths = WRONG[wrong].get("cache_seqlens", case.lengths)
        arguments["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
        if "table" in WRONG[wrong]:
            each = arguments["block_table"].shape[1]
            rows = [row[:3] + [1] * (each - 3) for row in WRONG[wrong]["table"]]
            arguments["block_table"] = torch.tensor(rows, dtype=torch.int32, device=device)
        if backend == "exact":
            arguments, backend = in_float64(arguments), "naive"
        before = {name: bits(arguments[name]).clone() for name in names}
        written = {name: touched(arguments[name], arguments) for name in names}
        out, lse = fa.attention_decode(**arguments, return_lse=True, backend=backend)
        for name in names:
            assert torch.equal(bits(arguments[name])[~written[name]], before[name][~written[name]])
            changed = bits(arguments[name])[written[name]] != before[name][written[name]]
            assert changed.any() == written[name].any()
        found.append((out, lse, *(arguments[name] for name in names)))
    for exact, naive, *others in zip(*found, strict=True):
        for other in others:
            assert_as_good(other, naive, exact)
            assert other.isfinite().all()


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("case", [EVERYTHING, PACKED], ids=lambda case: case.name)
@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore")
def test_operators_pass_opcheck(case, backend, device, tiles):
    case = case._replace(softcap=None) if backend == "cpu" else case
    tiles.splits(1)
    case = case._replace(lengths=(7,), C=16, Hq=2, Hkv=1)
    arguments = case.draw(device)
    decode = cache_call(arguments)
    call, turning = decode.call, (decode.cos, decode.sin, decode.interleaved)
    caches = decode.key_cache.nan_to_num(), decode.value_cache.nan_to_num(), decode.lengths, decode.table
    if decode.new_key is not None:
        new = decode.new_key, decode.new_value
        torch.library.opcheck(torch.ops.fusedattn.append.default, (*caches, *new, *turning, True, backend))
    options = call.bias, call.alibi_slopes, call.sinks, call.mask, call.key_mask, call.query_mask
    numbers = call.left, call.right, call.top_left, call.scale, call.softcap
    query = call.query.nan_to_num()
    for need_lse in (False, True):
        given = (query, *caches, decode.added, *turning, *options, *numbers, True, need_lse, backend)
        torch.library.opcheck(torch.ops.fusedattn.decode.default, given)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.one_in(3)
def test_compiled_whole_it_never_compiles_again_for_a_length(backend, device):
    case = PACKED._replace(lengths=(3, 44))
    eager, step = case.draw(device), case.draw(device)
    for arguments in (eager, step):
        names = arguments["block_table"]
        names.copy_(torch.arange(names.numel(), dtype=torch.int32, device=device).view(names.shape))
        arguments["cache_seqlens"].copy_(torch.tensor([0, 30], dtype=torch.int32))
        for name in ("key_cache", "value_cache"):
            arguments[name].fill_(1.0)
    compiled = torch.compile(
        lambda **arguments: fa.attention_decode(**arguments, return_lse=True, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    for _ in range(3):
        got, want = compiled(**step), fa.attention_decode(**eager, return_lse=True, backend=backend)
        exact = fa.reference.attention_decode(**in_float64(eager), return_lse=True)
        for each in zip(got, want, exact, strict=True):
            assert_as_good(*each)
        same([step["key_cache"], step["value_cache"]], [eager["key_cache"], eager["value_cache"]])
        for arguments in (eager, step):
            arguments["cache_seqlens"] += 2
            arguments["query"].normal_(generator=torch.Generator(device).manual_seed(1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
