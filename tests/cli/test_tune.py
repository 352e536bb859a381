"""fusedattn tune: what becomes of candidates that hang, die or are wrong, what is kept, and what is shown."""

import json
import sys
import threading
import time

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench.cases import Case

from fusedattn import cli
from fusedattn.cli import machine, tune
from fusedattn.cli.tune import child as process, children, plan
from fusedattn.launch import tiles as table, tuned
from fusedattn.launch.tuned import PASSED, Candidate
from fusedattn.testing import cases as named

ABOUT = dict(gpu="NVIDIA H200", capability="9.0", driver="580.1", torch="2.13.0", triton="3.7.1", fusedattn="1+abc")
SMALL = Case(1, 1, 1, 32, 32, 64, 64, False, "")


def candidate(rows, keys=16, kernel="forward", status=plan.WAITING, **ms):
    return Candidate(kernel, "float32", 64, "plain", table.Tile(rows, keys, 4, 1), status, "", ms)


class Answers:
    """A process that answers at once, from a table by rows; what is not there is right, and takes 1 ms."""

    def __init__(self, answers=()):
        self.asked, self.answers, self.stopped = [], dict(answers), False

    def ask(self, request):
        of = request["candidate"]
        self.asked.append((request["what"], of["kernel"], (of["form"] or {}).get("rows")))
        answer = self.answers.get(self.asked[-1][2], {})
        if isinstance(answer, BaseException):
            raise answer
        return dict(status=PASSED, why="", ms=dict.fromkeys(request.get("cases", ()), 1.0)) | answer

    def stop(self):
        self.stopped = True


def searched(search, some, seconds=1000.0, cases=lambda candidate: {"full": tuple(SMALL)}):
    notes = []
    complete = search.run(some, dict(device="cpu"), cases, time.monotonic() + seconds, notes.append)
    return complete, notes


def nothing():
    pass


@pytest.mark.parametrize("mistake", ["hangs", "aborts", "raises", "doubles", "breaks", "unfit"])
def test_a_mistake_costs_its_candidate_and_nothing_else(mistake, monkeypatch):
    """By the process itself, kernels interpreted: the second tile has the mistake, the others are proved and timed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    child = children.Child((sys.executable, "-m", "tests.cli.planted", f"{mistake}=32x16"), silent_s=20.0)
    request = dict(device="cpu", known=[], cases={"small causal": tuple(SMALL._replace(causal=True, dtype="float32"))})

    def asked(what, of):
        return child.ask(request | dict(what=what, candidate=tuned.entry(of)))

    try:
        assert asked("prove", candidate(16)) == dict(status=PASSED, why="", ms={})
        if mistake == "hangs":  # a process that begins is silent while it imports
            child.silent_s = 3.0
        found = asked("prove", candidate(32))
        status, why = {
            "hangs": ("hangs", "plain: nothing for 3 s"),
            "aborts": ("crashes", "plain: its process was ended by SIGABRT"),
            "raises": ("fails", "ValueError: an operand too many"),
            "doubles": ("wrong", "plain, out: "),
            "breaks": ("fails", "CUDA error: an illegal memory access"),
            "unfit": (tuned.UNFIT, "shared memory"),
        }[mistake]
        assert found["status"] == status and why in found["why"]
        assert asked("prove", candidate(64))["status"] == PASSED, "what one has left is not the next one's"
        assert asked("measure", candidate(16, status=PASSED)) == dict(status=PASSED, why="", ms={"small causal": 32.0})
    finally:
        child.stop()


def test_what_is_too_large_to_be_timed_is_right_all_the_same(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    child = children.Child((sys.executable, "-m", "tests.cli.planted", "exhausts=32x16"), silent_s=20.0)
    group = [candidate(32), candidate(16)]
    search = tune.Search([group], [], nothing)
    try:
        assert searched(search, [child], cases=lambda of: {"small": tuple(SMALL._replace(dtype="float32"))})[0]
    finally:
        child.stop()
    assert [(x.status, [*x.ms]) for x in search.tried()] == [(PASSED, []), (PASSED, ["small"])]
    assert "too little memory" in search.tried()[0].why
    assert [tile.rows for tile in tuned.choose(search.tried()).right[candidate(16).place]] == [16, 32]


@pytest.mark.parametrize("kernel", ["dq", "dkdv", "one_pass", "two_passes"])
def test_a_tile_of_the_backward_is_the_one_that_is_judged_and_timed(kernel, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    child = children.Child((sys.executable, "-m", "tests.cli.planted"), silent_s=60.0)
    known = [candidate(16, kernel="dq", status=PASSED), candidate(16, kernel="dkdv", status=PASSED)]
    form = None if kernel == "two_passes" else table.Tile(64, 16, 4, 1)
    of = Candidate(kernel, "float32", 64, "plain", form)
    request = dict(device="cpu", known=[tuned.entry(x) for x in known], candidate=tuned.entry(of))
    try:
        assert child.ask(request | dict(what="prove"))["status"] == PASSED
        cases = {"small": tuple(SMALL._replace(dtype="float32"))}
        answer = child.ask(request | dict(what="measure", cases=cases))
        assert answer["ms"] == {"small": 32.0 if kernel == "two_passes" else 80.0}
    finally:
        child.stop()


def test_pytorchs_own_is_timed_by_the_process_or_refuses(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    child = children.Child()
    cases = {"small": tuple(SMALL._replace(dtype="float32"))}
    try:
        for name, status in {"flash forward": PASSED, "flash backward": PASSED, "cudnn forward": "refused"}.items():
            of = candidate(0, kernel=f"sdpa:{name}")._replace(form=None)
            request = dict(device="cpu", known=[], candidate=tuned.entry(of), what="measure", cases=cases)
            found = child.ask(request)
            assert found["status"] == status, found
            assert [*found["ms"]] == ["small"] * (status == PASSED) and all(ms > 0 for ms in found["ms"].values())
    finally:
        child.stop()


def test_a_process_that_does_not_start_is_said():
    child = children.Child((sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(RuntimeError, match="does not start: try `fusedattn check`"):
        child.ask({})


def test_who_stops_a_process_does_not_blame_its_candidate():
    program = 'print(\'{"at": "the beginning"}\', flush=True); import time; time.sleep(1000)'
    child = children.Child((sys.executable, "-c", program))
    threading.Timer(1.0, child.stop).start()
    with pytest.raises(children.Stopped):
        child.ask({})
    with pytest.raises(children.Stopped):
        child.ask({})


def test_what_is_right_is_timed_and_two_passes_come_last():
    groups = [[candidate(16), candidate(32), candidate(16, kernel="two_passes")._replace(form=None)]]
    kept, child = [], Answers({32: dict(status="wrong", why="it is")})
    search = tune.Search(groups, [], lambda: kept.append([*search.tried()]))
    complete, notes = searched(search, [child])
    assert complete and [what for what, *_ in child.asked] == ["prove", "prove", "measure", "prove", "measure"]
    assert child.asked[-2:] == [("prove", "two_passes", None), ("measure", "two_passes", None)]
    assert [(x.status, x.ms) for x in search.tried()] == [
        (PASSED, {"full": 1.0}),
        ("wrong", {}),
        (PASSED, {"full": 1.0}),
    ]
    assert len(kept) == len(notes) == 5 and len(kept[0]) == 1, "each answer is kept at once"
    assert notes[1] == "prove forward 32x16 w4 s1, float32 64 plain: wrong"


def test_what_is_pytorchs_own_is_timed_and_not_proved(capsys):
    peer = candidate(0, kernel="sdpa:flash forward")._replace(form=None)
    child = Answers({None: dict(status="refused", why="it takes no float32")})
    search = tune.Search([[candidate(16), peer]], [], nothing)
    assert searched(search, [child])[0]
    assert child.asked == [("prove", "forward", 16), ("measure", "forward", 16), ("measure", peer.kernel, None)]
    assert [x.status for x in search.tried()] == [PASSED, "refused"]
    again = Answers()
    assert searched(tune.Search([[candidate(16), peer]], search.tried(), nothing), [again])[0] and not again.asked


def test_ours_stands_beside_the_best_of_pytorchs():
    known = [candidate(16, status=PASSED, full=2.0), candidate(32, status=PASSED, full=1.0)]
    known += [candidate(64, status="wrong", full=0.1), candidate(0, kernel="dq", status=PASSED, full=0.2)]
    known += [
        candidate(0, kernel=f"sdpa:{name}", status=status, full=ms)._replace(form=None)
        for name, status, ms in (
            ("cudnn forward", PASSED, 3.0),
            ("flash forward", PASSED, 1.5),
            ("flash backward", PASSED, 9.0),
            ("efficient forward", "refused", 0.1),
        )
    ]
    assert [*tune._beside(known)] == [["float32", "full", "forward", 1.0, 1.5, "sdpa:flash", "1.50x"]]
    assert tuned.choose(known).right["forward", "float32", 64, "plain"][0].rows == 32


@pytest.mark.parametrize("kernel", ["sdpa:math backward", "sdpa:flash sideways", "sdpa:flash"])
def test_a_peer_that_there_is_not_is_no_candidate(kernel):
    entry = tuned.entry(candidate(0, kernel="sdpa:flash forward")._replace(form=None))
    assert tuned.candidate_of(entry).kernel == "sdpa:flash forward"
    with pytest.raises(KeyError):
        tuned.candidate_of(entry | dict(kernel=kernel))


def test_a_second_run_goes_on_and_keeps_what_it_does_not_ask_for():
    other = candidate(64, status=PASSED)._replace(dtype="float16")
    known = [other, candidate(16, status="hangs"), candidate(32, status=PASSED)]
    child = Answers()
    search = tune.Search([[candidate(16), candidate(32), candidate(64)]], known, nothing)
    assert searched(search, [child])[0]
    assert child.asked == [("prove", "forward", 64), ("measure", "forward", 32), ("measure", "forward", 64)]
    assert search.tried()[0] == other and [x.status for x in search.tried()[1:]] == ["hangs", PASSED, PASSED]
    again = Answers()
    assert searched(tune.Search([[candidate(16), candidate(32), candidate(64)]], search.tried(), nothing), [again])[0]
    assert again.asked == []


def test_when_the_time_is_over_nothing_is_begun():
    search, child = tune.Search([[candidate(16)]], [], nothing), Answers()
    assert not searched(search, [child], seconds=-1.0)[0] and child.asked == [] and search.tried() == []
    search = tune.Search([[candidate(16, status=PASSED)]], [], nothing)
    assert not searched(search, [child], seconds=-1.0)[0] and child.asked == []


def test_an_interrupt_stops_the_processes_and_keeps_what_was_found():
    search, child = tune.Search([[candidate(16), candidate(32), candidate(64)]], [], nothing), Answers()
    child.answers[32] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        searched(search, [child])
    assert child.stopped and [x.form.rows for x in search.tried()] == [16]


@pytest.mark.parametrize("capability, pipelines", {80: 0, 86: 0, 90: 17, 120: 0}.items())
def test_candidates_are_all_that_calls_may_take(capability, pipelines):
    groups = [*plan.candidates(capability, tuned.DTYPES[:2], tuned.LOADS)]
    every = [x for group in groups for x in group]
    assert len({(x.place, x.form) for x in every}) == len(every) and len(groups) == 2 * 3 * 3
    assert sum(x.kernel in table.ON_HOPPER for x in every) == 2 * pipelines
    for x in every:
        assert tuned.candidate_of(tuned.entry(x)) == x
    assert [x.place[:3] for x in groups[0]][0] == ("forward", "bfloat16", 128)
    for place in {x.place for x in every if x.kernel in tuned.KERNELS}:
        kernel, dtype, width, load = place
        itemsize = getattr(torch, dtype).itemsize
        known = {table.same(tile) for tile in table.candidates(kernel, capability, itemsize, width, load)}
        assert {x.form for x in every if x.place == place} == known


def test_cases_are_of_the_width_and_the_load():
    plain = plan.cases(candidate(16), [], plan.LENGTHS)
    assert [*plain] == [
        "4,32,32,4096,4096,64",
        "4,32,32,4096,4096,64 causal",
        "16,32,32,1024,1024,64",
        "16,32,32,1024,1024,64 causal",
    ]
    assert all(Case(*fields).causal == name.endswith("causal") for name, fields in plain.items())
    (rich,) = plan.cases(candidate(16)._replace(load="rich"), [SMALL, SMALL._replace(D=128)], plan.LENGTHS)
    assert rich == "1,1,1,32,32,64 dropout=0.1 causal"


@pytest.mark.parametrize("width", [64, 128, 256])
def test_named_cases_take_the_tiles_of_a_width(width):
    for case in named.CASES:
        wide = case.at_width(width)
        assert table.row_width(max(wide.dim, wide.value_dim)) == width and max(wide.dim, wide.value_dim) > width // 2
        assert (wide.dim % 2, wide.value_dim % 2) == (case.dim % 2, case.value_dim % 2)
    assert {process.load_of(case) for case in named.CASES} == {*tuned.LOADS}


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is not there, whose processes answer at once; its folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    monkeypatch.setattr(tuned, "about", lambda device: dict(ABOUT))
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path)
    monkeypatch.setattr(children, "Child", Answers)
    return tmp_path


def answer(capsys, *options):
    status = cli.main(["tune", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def test_the_command_tries_keeps_shows_exports_and_forgets(gpu, capsys):
    assert cli.main(["tune", "--quick", "--shape", "1,8,8,512,512,64"]) == 0
    assert "for 1 minutes" in capsys.readouterr().out and answer(capsys, "--forget")[0] == 0
    older = tuned.path(ABOUT | dict(torch="2.10.0"))
    tuned.write(older, ABOUT, [])
    status, said = answer(capsys, "--quick", "--shape", "1,8,8,512,512,64")
    older.unlink()
    assert status == 0 and said["complete"] and said["wrong"] == 0 and said["about"] == ABOUT
    (file,) = gpu.glob("*.json")
    assert said["file"] == str(file) == str(tuned.path(ABOUT))
    about, known = tuned.read(file)
    assert about == ABOUT and {x.width for x in known} == {64} and {x.load for x in known} == {"plain"}
    assert {x.kernel for x in known} == {*tuned.FORMS} - {"hopper_bwd_256", "hopper_stored"} and all(
        len(x.ms) == 2 for x in known
    )
    before = file.read_bytes()
    assert answer(capsys, "--show")[0] == 0 and answer(capsys, "--export", str(gpu / "mine.json"))[0] == 0
    assert file.read_bytes() == before == (gpu / "mine.json").read_bytes()
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "128x128" in shown and "two_passes" in shown and str(file) in shown.replace("\n", "")
    assert answer(capsys, "--forget")[0] == 0 and not file.exists()
    assert answer(capsys, "--show")[0] == 1, "there is nothing to show"


def test_what_is_wrong_is_said_and_is_no_failure_of_the_command(gpu, capsys, monkeypatch):
    monkeypatch.setattr(children, "Child", lambda: Answers({64: dict(status="hangs", why="plain: nothing for 60 s")}))
    assert cli.main(["tune", "--quick"]) == 0
    said = capsys.readouterr().out
    assert "hangs: forward 64x64 w4 s2, bfloat16 128 plain: plain: nothing for 60 s" in said


def test_an_interrupt_says_how_to_go_on(gpu, capsys, monkeypatch):
    monkeypatch.setattr(children, "Child", lambda: Answers({64: KeyboardInterrupt()}))
    assert cli.main(["tune", "--quick"]) == 0
    before = [tile.rows for tile in table.candidates("forward", 90, 2, 128)].index(64)
    assert "goes on from here" in capsys.readouterr().out and len(tuned.read(tuned.path(ABOUT))[1]) == before


def test_of_two_that_write_one_file_the_second_says_so(gpu, capsys):
    first = tune._taken(tuned.path(ABOUT))
    assert cli.main(["tune", "--quick"]) == 2
    assert "another `fusedattn tune` is writing" in capsys.readouterr().err
    first.close()
    assert cli.main(["tune", "--quick"]) == 0


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_tried(gpu, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuned, "folder", lambda: tmp_path / "file" / "tuning")
    assert cli.main(["tune", "--quick"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_forgetting_removes_what_other_versions_have_left(gpu, capsys):
    older = tuned.path(ABOUT | dict(torch="2.10.0"))
    other = tuned.path(ABOUT | dict(gpu="NVIDIA H200 NVL"))
    for file in (older, other):
        tuned.write(file, ABOUT, [])
    assert answer(capsys, "--forget")[0] == 0 and not older.exists() and other.exists()


def test_a_damaged_file_is_begun_again(gpu, capsys):
    tuned.path(ABOUT).write_text("{")
    assert cli.main(["tune", "--quick"]) == 0
    assert "it is begun again" in capsys.readouterr().out and tuned.read(tuned.path(ABOUT))[1]


@pytest.mark.parametrize(
    "options, why",
    {("--export", "x.json"): "export: there is nothing yet", ("--shape", "1,2"): "shape: expected six"}.items(),
)
def test_a_command_that_cannot_be_run_says_why(options, why, gpu, capsys):
    assert cli.main(["tune", *options]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "x"])
def test_minutes_are_a_number_above_0(minutes):
    with pytest.raises(SystemExit):
        cli.main(["tune", "--minutes", minutes])


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["tune"]) == 2
    assert "torch finds none" in capsys.readouterr().err
