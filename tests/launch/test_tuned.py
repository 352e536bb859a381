"""Tuning files: what is read, what is ignored with a warning, and what calls take of it."""

import json
import types
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import triton

import fusedattn as fa
from fusedattn import backends
from fusedattn.call import form
from fusedattn.call.form import asking
from fusedattn.launch import backward, failures, hopper, run, tiles as table, tuned
from fusedattn.launch.tuned import NOTHING, Candidate, choose
from fusedattn.replay import cache

from ..inside import compiled, only_interpreted, passes_compiled
from ..offline import absent
from .test_run import call

GPU = torch.device("cuda", 0)
ABOUT = dict(gpu="NVIDIA H200", capability="9.0", driver="580.1", torch="2.13.0", triton="3.7.1", fusedattn="1+abc")
FIRST, SECOND, THIRD = (table.Tile(rows, 64, 4, stages) for rows, stages in ((128, 2), (64, 2), (64, 3)))
GRID, WAY_BACK = table.HOPPER[128][2], table.BACKWARDS["hopper_bwd"][128][0]


def forward(form, dtype="bfloat16", width=128, status=tuned.PASSED, **ms):
    kernel = "forward" if isinstance(form, table.Tile) else "hopper"
    return Candidate(kernel, dtype, width, "plain", form, status, "" if status == tuned.PASSED else "it was", ms)


CANDIDATES = [
    forward(FIRST, status="wrong"),
    forward(SECOND, full=2.0, causal=1.2),
    forward(THIRD, full=1.5, causal=1.1),
    forward(GRID, full=1.6, causal=1.0),
    Candidate("one_pass", "bfloat16", 128, "plain", FIRST, ms={"full": 4.0}),
    Candidate("two_passes", "bfloat16", 128, "plain", None, ms={"full": 3.0}),
]


@only_interpreted
def test_this_file_without_the_interpreter():
    passes_compiled(__file__)


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The folder of files of a machine whose GPU is not there."""
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    monkeypatch.setattr(tuned, "about", lambda device: dict(ABOUT))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ABOUT["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    fa.tuning.forget()
    yield tmp_path
    fa.tuning.forget()


def said(device=GPU):
    """(the Choices of a device, warnings) of two calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = tuned.of(device), tuned.of(device)
    assert found[0] is found[1]
    return found[0], [str(warning.message) for warning in caught]


def test_the_fastest_that_passed_is_first_and_what_failed_is_not_taken():
    chosen = choose(CANDIDATES)
    place = "forward", "bfloat16", 128, "plain"
    assert chosen.tiles(place, (FIRST, SECOND)) == (THIRD, SECOND)
    spilling = FIRST._replace(spills=8), table.Tile(32, 32, 4, 2)
    assert chosen.tiles(place, spilling) == (THIRD, SECOND, spilling[1]), "whatever it may spill, it is the one"
    for other in (("forward", "float16", 128, "plain"), ("forward", "bfloat16", 128, "rich")):
        assert chosen.tiles(other, spilling) == spilling
    assert chosen.slower == {("hopper", "bfloat16", 128, False)}
    assert chosen.two_passes == {("bfloat16", 128, "plain")}
    for width, first in ((128, GRID), (64, table.HOPPER[64][0])):
        assert on_hopper(chosen, width) == first


def on_hopper(chosen, dim, rows=300, causal=True):
    """The form that a forward takes on compute capability 9.0, by these choices."""
    x = torch.empty(1, 2, rows, dim, dtype=torch.bfloat16, device="meta")
    tuned.ask(chosen)
    try:
        return fa.explain(x, x, x, causal=causal, capability=(9, 0)).tiles.get("hopper")
    finally:
        tuned.ask(None)


def test_the_form_of_long_calls_is_not_that_of_short_ones_though_the_sum_of_their_times_says_so():
    long, (short, *_) = table.HOPPER_LONG[64][1], table.HOPPER[64]
    timed = [
        Candidate("hopper", "bfloat16", 64, "plain", form, ms=dict(all=ms)) for form, ms in ((long, 1), (short, 2))
    ]
    assert on_hopper(choose(timed), 64) == on_hopper(choose(timed), 64, 2047, False) == short
    assert on_hopper(choose(timed), 64, 2048, False) == on_hopper(choose(timed), 64, 8192) == long
    slower = choose([one._replace(ms=dict(all=4 - one.ms["all"] * 2)) for one in timed])
    assert on_hopper(slower, 64, 2048, False) == short, "a file comes before the table"
    wrong = [timed[0]._replace(status="wrong", form=form) for form in table.HOPPER[64] if form != long]
    alone = choose([timed[0], *wrong])
    assert on_hopper(alone, 64) == long, "all others are wrong"


def backwards(special=1.0, ordered=2.5, one_pass=2.0, two_passes=3.0):
    """Candidates of a causal backward, by how long each takes."""
    times = dict(one_pass=one_pass, two_passes=two_passes, hopper_bwd=special, hopper_ordered=ordered)
    forms = dict(one_pass=FIRST, two_passes=None) | dict.fromkeys(("hopper_bwd", "hopper_ordered"), WAY_BACK)
    return [Candidate(x, "bfloat16", 128, "plain", forms[x], ms={"causal": ms}) for x, ms in times.items() if ms]


def test_a_backward_for_hopper_is_slower_where_a_universal_one_of_the_same_bits_is_faster():
    def slower(**times):
        return {kernel for kernel, *_ in choose(backwards(**times)).slower}

    assert not slower()
    assert slower(special=2.1) == {"hopper_bwd"}
    assert not slower(special=2.1, one_pass=None)
    assert slower(ordered=3.1) == {"hopper_ordered"}
    assert not slower(ordered=2.5), "one pass is no rival of it: its bits differ"
    assert not slower(one_pass=None, two_passes=None)


def test_of_wide_heads_the_faster_backward_for_hopper_is_taken(monkeypatch):
    """That which stores gradients of scores, in calls whose gradients of scores have a place; in turns it alone."""

    def made(adds=2.0, stores=1.0, status=tuned.PASSED):
        ways = dict(two_passes=3.0, hopper_bwd_256=adds, hopper_stored=stores)
        forms = {name: table.BACKWARDS.get(name, {256: (None,)})[256][0] for name in ways}
        found = [
            Candidate(x, "bfloat16", 256, "plain", forms[x], ms=dict(full=1.0, causal=ms)) for x, ms in ways.items()
        ]
        return [x._replace(status=status) if x.kernel == "hopper_bwd_256" else x for x in found]

    assert not choose(made()).adding and not choose(made(status="wrong")).adding
    slower = choose(made(stores=2.5))
    assert slower.adding == {("bfloat16", 256, True)} and not slower.slower
    monkeypatch.setattr(run, "capability", lambda device: 90)
    bound = call(dim=256, dv=200, dtype=torch.bfloat16)._replace(right=0, named=False)
    bound = bound._replace(**{x: getattr(bound, x).repeat(3, 1, 1, 1) for x in ("query", "key", "value")})
    try:
        for some, ordered, scores, number, failing, name in (
            (made(), False, 2**29, 1, None, "hopper_stored"),
            (made(), False, 100, 1, None, "hopper_bwd_256"),
            (made(), False, 2**29, 132, None, "hopper_stored"),
            (made(), False, 2**17, 132, None, "hopper_bwd_256"),
            (made(), False, 2**29, 1, "hopper_stored", "hopper_bwd_256"),
            (made(stores=2.5), False, 2**29, 1, None, "hopper_bwd_256"),
            (made(stores=2.5), False, 2**29, 1, "hopper_bwd_256", "hopper_stored"),
            (made(stores=2.5), True, 2**29, 1, None, "hopper_stored"),
        ):
            tuned.ask(choose(some))
            monkeypatch.setattr(table, "SCORES_BYTES", scores)
            monkeypatch.setattr(run, "multiprocessors", lambda device, number=number: number)
            monkeypatch.setattr(failures, "known", lambda kind, x=failing: "why" if kind[0] == x else None)
            assert run.backward_on_hopper(bound, ordered) == name, (scores, number, failing)
            if (scores, number, failing, ordered) == (2**29, 1, None, False):
                assert run.backward_on_hopper(bound._replace(right=None), False) == "hopper_stored"
                assert run.backward_on_hopper(bound._replace(left=3), False) == name
                assert run.is_to_take(name, bound, "triton")
        monkeypatch.setattr(run, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(table, "SCORES_BYTES", 2**17)
        assert run.backward_on_hopper(bound, False) == "hopper_bwd_256", "of so few heads it is faster"
        asked = bound._replace(deterministic=True)
        assert "hopper_stored" in backward.passes(asked, [True] * 3 + [False] * 3)
    finally:
        tuned.ask(None)


@pytest.mark.parametrize("batch, heads, keys, causal, fills", [
    (4, 8, 4096, False, True), (4, 8, 4096, True, True), (1, 8, 16384, True, True), (2, 8, 8192, True, True),
    (4, 2, 1024, False, True), (1, 8, 4096, True, True), (1, 4, 4096, True, True), (1, 5, 4096, False, True),
    (4, 3, 8192, True, True), (4, 3, 8192, False, True), (8, 1, 12288, True, False), (8, 1, 12288, False, True),
])  # fmt: skip
def test_whether_heads_at_a_time_fill_a_gpu(batch, heads, keys, causal, fills):
    """Heads that are stored in turns need programs for 95 of 100 multiprocessors, for twice that under a band."""
    given = [torch.empty(batch, n, keys, 256, dtype=torch.bfloat16, device="meta") for n in (heads, heads, heads)]
    call = form.Call(**dict.fromkeys(form.Call._fields) | dict(zip(("query", "key", "value"), given, strict=True)))
    at_a_time = hopper.heads_at_a_time(call)
    assert min(2, batch * heads) <= at_a_time <= batch * heads
    assert at_a_time * 2 * keys * keys <= 2**30
    assert hopper.stored_fill(call._replace(right=0 if causal else None), 132) == fills
    grouped = call._replace(query=torch.empty(batch, 8 * heads, keys, 256, dtype=torch.bfloat16, device="meta"))
    if not hopper.stored_limits(grouped):
        assert hopper.heads_at_a_time(grouped) <= at_a_time


def test_what_lacks_a_time_comes_last_and_is_no_faster():
    chosen = choose([forward(FIRST, full=1.0), forward(SECOND, full=2.0, causal=1.0), forward(GRID)])
    assert chosen.right["forward", "bfloat16", 128, "plain"] == (SECOND, FIRST)
    assert not chosen.slower and not chosen.two_passes
    assert choose([]) == NOTHING


def test_what_does_not_fit_or_is_not_known_is_not_wrong():
    open_ones = [forward(FIRST, status=tuned.UNFIT), forward(SECOND, status=tuned.UNKNOWN)]
    found = choose(open_ones)
    assert not found.wrong and found.tiles(open_ones[0].place, (FIRST, THIRD)) == (FIRST, THIRD)


def test_times_are_compared_of_the_same_cases():
    """A second run may have timed other shapes, of some candidates."""
    universal, special = forward(FIRST, long=4.0, mine=1.0), forward(GRID, long=4.5)
    assert choose([universal, special]).slower == {("hopper", "bfloat16", 128, False)}
    assert not choose([universal, forward(GRID, long=3.5)]).slower
    assert not choose([universal, forward(GRID, other=9.5)]).slower


@pytest.mark.parametrize("error", [PermissionError("not yours"), RuntimeError("no home")], ids=str)
def test_a_home_that_cannot_be_looked_into_has_no_file(error, files, monkeypatch):
    def folder():
        raise error

    monkeypatch.setattr(tuned, "folder", folder)
    assert said() == (NOTHING, [])


def test_a_file_that_cannot_be_replaced_stays_as_it_was(files, monkeypatch):
    path = files / "mine.json"
    tuned.write(path, ABOUT, CANDIDATES)
    before = path.read_bytes()

    def fails(self, target):
        raise OSError("the disk is gone")

    monkeypatch.setattr(type(path), "replace", fails)
    with pytest.raises(OSError, match="gone"):
        tuned.write(path, ABOUT, [])
    assert path.read_bytes() == before and [*files.iterdir()] == [path]


def test_a_file_that_is_loaded_or_forgotten_reaches_calls_that_were_made_before(files, monkeypatch):
    tuned.write(files / "mine.json", ABOUT, CANDIDATES)
    forgotten = []
    monkeypatch.setattr(cache, "forget", lambda: forgotten.append(True))
    for step in (lambda: fa.tuning.load(files / "mine.json"), fa.tuning.forget):
        table.fitting["a kind of call"] = ()
        step()
        assert not table.fitting and forgotten.pop(), "tiles, and recorded launches, are those of before"


def test_a_file_is_about_the_gpu_and_all_versions(monkeypatch):
    gpu = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(tuned, "driver", lambda: "580.1")
    found = tuned.about(GPU)
    assert tuple(found) == tuned.ABOUT and found["capability"] == "9.0" and found["driver"] == "580.1"
    assert found["torch"] == torch.__version__ and found["triton"] == triton.__version__
    assert found["fusedattn"] == tuned._version()


def test_where_one_pass_is_wrong_two_are_taken_and_where_all_pipelines_are_none_is():
    wrong = [
        Candidate("one_pass", "float16", 64, "plain", FIRST, "hangs", "it was"),
        *(forward(x, status="wrong") for x in table.HOPPER[128]),
    ]
    chosen = choose(wrong)
    assert chosen.two_passes == {("float16", 64, "plain")}
    assert on_hopper(chosen, 128) is None


def test_a_file_of_this_machine_counts(files):
    tuned.write(tuned.path(ABOUT), ABOUT, CANDIDATES)
    assert tuned.read(tuned.path(ABOUT)) == (ABOUT, CANDIDATES)
    assert said() == (choose(CANDIDATES), [])
    assert said(torch.device("cpu")) == (NOTHING, [])
    assert [path.name for path in files.iterdir()] == [tuned.path(ABOUT).name], "no part of a file is left"


def test_without_a_file_nobody_asks_what_the_gpu_is(files, monkeypatch):
    monkeypatch.setattr(tuned, "about", lambda device: pytest.fail("it starts a process"))
    assert said() == (NOTHING, [])


def test_a_file_of_another_gpu_is_not_looked_at_and_one_of_other_versions_is_named(files):
    tuned.write(tuned.path(ABOUT | dict(gpu="NVIDIA A100")), ABOUT | dict(gpu="NVIDIA A100"), CANDIDATES)
    assert said() == (NOTHING, [])
    fa.tuning.forget()
    older = tuned.path(ABOUT | dict(torch="2.10.0"))
    tuned.write(older, ABOUT | dict(torch="2.10.0"), CANDIDATES)
    found, (warning,) = said()
    assert found is NOTHING and str(older) in warning and "other versions" in warning


def changed(**changes):
    return lambda content: json.dumps(content | changes)


def entry(**changes):
    return lambda content: json.dumps(content | dict(candidates=[content["candidates"][1] | changes]))


DAMAGED = {
    "half of it is there": (lambda content: json.dumps(content)[:200], "damaged"),
    "it is empty": (lambda content: "", "damaged"),
    "it is a list": (lambda content: "[]", "it is no JSON object"),
    "it is not text": (lambda content: "\udcff", "damaged"),
    "it has no candidates": (lambda content: json.dumps({"format": 1, "about": ABOUT}), "it has no 'candidates'"),
    "it is about nothing": (changed(about={}), "it has no 'gpu'"),
    "it has no end": (lambda content: "[" * 100_000, "damaged"),
    "a number of 400 digits": (entry(ms=dict(full=10**400)), "damaged"),
    "a tile without rows": (entry(form=dict(rows=0, keys=64, warps=4, stages=2)), "there is no form"),
    "three warps": (entry(form=dict(rows=64, keys=64, warps=3, stages=2)), "there is no form"),
    "no stage": (entry(form=dict(rows=64, keys=64, warps=4, stages=0)), "there is no form"),
    "half a width": (entry(width=128.0), "width 128.0"),
    "another format": (changed(format=2), "its format is 2, and this version reads 1"),
    "another machine": (changed(about=ABOUT | dict(gpu="NVIDIA A100")), "gpu NVIDIA A100 and not NVIDIA H200"),
    "an older version": (changed(about=ABOUT | dict(fusedattn="0+abc")), "fusedattn 0.abc and not 1.abc"),
    "a kernel that is none": (entry(kernel="backward"), "damaged"),
    "a dtype that is none": (entry(dtype="float64"), "there is no forward of float64"),
    "a width that is none": (entry(width=96), "width 96 and plain calls"),
    "a load that is none": (entry(load="heavy"), "heavy calls"),
    "a tile of words": (entry(form=dict(rows="64", keys=64, warps=4, stages=2)), "there is no form"),
    "a huge tile": (entry(form=dict(rows=4096, keys=64, warps=4, stages=2)), "there is no form"),
    "a time below 0": (entry(ms=dict(full=-1.0)), "a time that is none"),
    "a time that is NaN": (entry(ms=dict(full=float("nan"))), "a time that is none"),
}


@pytest.mark.parametrize("change, why", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_is_damaged_foreign_or_older_is_ignored_with_one_warning(change, why, files):
    path = tuned.path(ABOUT)
    tuned.write(path, ABOUT, CANDIDATES)
    path.write_bytes(change(json.loads(path.read_text())).encode("utf-8", "surrogateescape"))
    found, (warning,) = said()
    assert found is NOTHING and str(path) in warning and "ignores a tuning file" in warning
    pytest.raises(ValueError, tuned.load, path).match(why)


def test_a_file_is_loaded_until_it_is_forgotten(files):
    path = files / "exported" / "mine.json"
    tuned.write(path, ABOUT, CANDIDATES)
    assert said()[0] is NOTHING
    fa.tuning.load(path)
    assert said() == (choose(CANDIDATES), [])
    fa.tuning.forget()
    assert said()[0] is NOTHING
    with pytest.raises(OSError):
        fa.tuning.load(files / "missing.json")


def test_a_file_is_loaded_where_there_is_no_gpu(files, monkeypatch):
    tuned.write(files / "mine.json", ABOUT | dict(gpu="NVIDIA A100"), CANDIDATES)
    with pytest.raises(ValueError, match="of another machine or version: gpu NVIDIA A100 and not NVIDIA H200"):
        fa.tuning.load(files / "mine.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fa.tuning.load(files / "mine.json")


def test_the_kernels_are_a_part_of_the_version():
    """What was proved of some kernels is not of others, which a checkout has under the same version."""
    version, digest = tuned._version().split("+")
    assert version == fa.__version__ and len(digest) == 12


@pytest.mark.parametrize("named", ["/cache/of/mine", "relative", ""])
def test_files_are_in_the_cache_folder_of_the_user(named, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", "/home/me")
    inside = named if named.startswith("/") else "/home/me/.cache"
    assert str(tuned.folder()) == f"{inside}/fusedattn/tuning"


@pytest.fixture
def chosen(monkeypatch):
    """chosen(candidates): calls take what these choose."""

    def of(candidates):
        found = choose(candidates)
        monkeypatch.setattr(tuned, "of", lambda device: found)
        monkeypatch.setattr(table, "fitting", {})

    monkeypatch.setattr(run, "capability", lambda device: 90)
    return of


def bf16(**options):
    """A call that names "triton", as kernels for Hopper would take it otherwise."""
    return call(dtype=torch.bfloat16, dim=128, dv=128, **options)._replace(named=True)


def test_calls_take_the_tiles_that_were_chosen(chosen):
    plain = table.tiles("forward", 90, 2, 128)
    assert run.candidates("forward", bf16()) == plain
    chosen([forward(plain[0], status="wrong"), forward(THIRD, full=1.0)])
    assert run.candidates("forward", bf16()) == (THIRD, *plain[1:])
    assert run.candidates("forward", call(dtype=torch.float16, dim=128, dv=128)) == plain
    few = run.candidates("forward", bf16(sq=8))
    assert few == (THIRD, *(tile for tile in plain[1:] if max(tile.rows, tile.keys) <= 64)), (
        "no larger tile for few rows"
    )


def test_a_backward_is_in_the_passes_that_were_chosen(chosen):
    every = [True, True, True, False, False, False]
    assert "one_pass" in backward.passes(bf16(), every)
    chosen(CANDIDATES)
    assert backward.passes(bf16(), every) == ("preprocess", "dq", "dkdv")
    narrow = call(dtype=torch.bfloat16, dim=64, dv=64)._replace(named=True)
    assert "one_pass" in backward.passes(narrow, every)


def test_a_kernel_whose_every_tile_is_wrong_is_refused(chosen):
    assert run.failed(bf16(), ["forward"]) is None
    chosen([forward(tile, status="wrong") for tile in table.tiles("forward", 90, 2, 128)])
    assert "found no 'forward' that gives right numbers" in str(run.failed(bf16(), ["forward"]))
    assert run.failed(call(), ["forward"]) is None, "of another dtype"


@compiled
def test_a_file_that_finds_a_backward_for_hopper_slower_leaves_it_to_calls_that_name_it(chosen, monkeypatch):
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    inputs = [torch.randn(1, 2, 70, 128, dtype=torch.bfloat16) for _ in range(3)]
    slower = "the tuning file of this GPU found it slower"
    with absent.gpu(90):
        chosen(backwards(special=4.0, ordered=4.0))
        for repeatable, name in ((False, "hopper_bwd"), (True, "hopper_ordered")):
            with asking(deterministic=repeatable):
                found = fa.explain(*inputs)
                assert found.backend == "hopper" and found.tiles[name] == WAY_BACK and "dkdv" not in found.tiles
                assert not found.backward
                for options, why in (
                    (dict(backend="triton"), "'triton' is named"),
                    (dict(window=(4, 0)), slower),
                    (dict(causal=True), slower),
                    (dict(causal=True, softcap=3.0), "it knows no softcap"),
                ):
                    found = fa.explain(*inputs, **options)
                    assert name not in found.tiles and found.backward[0].startswith(why), options
                    assert f"not hopper, of the backward: {why}" in str(found)
        monkeypatch.setattr(failures, "known", lambda kind: "it does not load" if kind[0] == "hopper_bwd" else None)
        found = fa.explain(*inputs)
        assert "one_pass" in found.tiles and found.backward == ["it does not load"]
        chosen([x._replace(status="wrong") for x in backwards() if x.kernel == "hopper_bwd"])
        for named in ({}, dict(backend="hopper")):
            found = fa.explain(*inputs, causal=True, **named)
            assert "one_pass" in found.tiles
            assert found.backward in (["it does not load"], [f"{run.none_is_right('hopper_bwd', inputs[0].device)}"])


@compiled
def test_a_file_that_finds_the_forward_for_hopper_slower_leaves_it_to_calls_that_name_it(chosen, monkeypatch):
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    chosen(CANDIDATES)
    inputs = [torch.randn(1, 2, 70, 128, dtype=torch.bfloat16) for _ in range(3)]
    with absent.gpu(90):
        for options in (dict(causal=True), dict(window=(4, 0)), dict(window=(4, 4))):
            found = fa.explain(*inputs, **options)
            assert found.backend == "hopper" and [*found.tiles] == ["hopper", "preprocess", "hopper_bwd", "postprocess"]
            assert found.tiles["hopper"] == GRID
        found = fa.explain(*inputs)
        assert found.backend == "triton"
        assert "the tuning file of this GPU found it slower" in "; ".join(found.reasons["hopper"])
        assert fa.explain(*inputs, backend="hopper").backend == "hopper"
        chosen([forward(x, status="wrong") for x in table.HOPPER[128]])
        found = fa.explain(*inputs, backend="hopper")
        assert found.backend is None and "found no 'hopper' that gives right numbers" in str(found)
        with pytest.raises(NotImplementedError, match="found no 'hopper'"):
            fa.attention(*inputs, backend="hopper")
        chosen([forward(tile, status="wrong") for tile in table.tiles("forward", 90, 2, 128)])
        graph = torch.compile(fa.attention, backend="aot_eager", fullgraph=True)
        leaves = [x.clone().requires_grad_() for x in inputs]
        with pytest.warns(UserWarning, match="takes a slower path: .* found no 'forward' that gives right numbers"):
            got = torch.autograd.grad(graph(*leaves).sum(), leaves)
    want = torch.autograd.grad(fa.attention(*leaves, backend="naive").sum(), leaves)
    assert all(map(torch.equal, got, want)), "the gradients are of the path that computed the forward"
