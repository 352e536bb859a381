"""The process that runs candidates, and dies in place of `fusedattn tune` if one of them kills it.

It reads a request a line, {"what", "device", "candidate", "known", ...}, and answers in lines: {"at": what it does now}
again and again, which says that it is alive, then {"status", "why", "ms", "ends"}. Its other output goes to stderr.
"""

import contextlib
import json
import os
import sys
from collections.abc import Collection
from unittest import mock

import torch

from ... import attention, reference
from ...bench import cases as bench_cases, engine, timing
from ...bench.calls import Unsupported
from ...call.form import asking
from ...launch import failures, tiles, tuned
from ...launch.tuned import PASSED, UNFIT, UNKNOWN, Candidate, Choices
from ...replay import cache
from ...testing.cases import CASES, Case
from ...testing.compare import INPUTS, LEARNED, in_float64, with_gradients
from ...testing.tolerance import Verdict, verdicts

# What a kernel is judged by, and which gradients it is timed on: of query, key and value.
RESULTS = {"forward": ("out", "lse"), "hopper": ("out", "lse"), "dq": ("query",), "dkdv": ("key", "value")}
RESULTS |= dict.fromkeys(("one_pass", "two_passes", *tiles.BACKWARDS), ("query", "key", "value"))
BUDGET_MS = 60.0
# Named cases are of few rows, for an interpreter: with so many times as many there are more blocks than stages.
TIMES = 11
BATCHES, REPEATS = 16, 10  # of calls whose bits are compared
FEW = ("plain", "causal more keys", "one kv head for 3", "value wider")  # what `--quick` proves by


def load_of(case: Case) -> str:
    """The load of a named case, as `launch.tiles.tiles` has it."""
    if {"bias", "alibi_slopes"} & {*case.drawn} or {"softcap", "dropout_p"} & {*case.options}:
        return "rich"
    return "masked" if "mask" in case.drawn else "plain"


def alone(candidate: Candidate, known: Choices, table: tuple[tiles.Tile, ...]) -> Choices:
    """Choices with which calls take a candidate and nothing else in its place; elsewhere what is known to be best.

    Calls of few rows or in narrow bands, which take no large tile, have the small ones of the table.
    """
    kernel, place = candidate.kernel, candidate.place
    right, wrong = {**known.right}, {**known.wrong}
    if candidate.form is not None:
        small = () if tiles.small_enough((candidate.form,)) else tuple(map(tiles.same, tiles.small_enough(table)))
        right[place] = (candidate.form,)
        wrong[place] = tuple(tile for tile in map(tiles.same, table) if tile not in (candidate.form, *small))
    in_two = kernel in ("dq", "dkdv", "two_passes")
    return Choices(right, wrong, two_passes=frozenset([candidate.place[1:]] if in_two else []))


@contextlib.contextmanager
def asked(candidate: Candidate, known: Choices, device: str):
    """Inside, calls take a candidate where they can; yields (the backend to name, what was launched since `clear`).

    That is a set of (kernel, rows, keys, warps, stages).
    """
    from ...launch import run

    kernel, dtype, width, load = candidate.place
    table: tuple[tiles.Tile, ...] = ()
    if kernel in tuned.KERNELS:
        itemsize = getattr(torch, dtype).itemsize
        table = tiles.candidates(kernel, run.capability(torch.device(device)), itemsize, width, load)
    launched: set[tuple] = set()
    run_kernel = run.run_kernel

    def noted(name, programs, arguments, *rest, **options):
        sizes = (arguments.get(x) for x in ("BLOCK_M", "BLOCK_N"))
        run_kernel(name, programs, arguments, *rest, **options)
        launched.add((name, *sizes, options.get("num_warps"), options.get("num_stages")))

    failures.forget()  # what an earlier candidate left
    tuned.ask(alone(candidate, known, table))
    cache.forget()
    try:
        with mock.patch.object(run, "run_kernel", noted):
            with asking(deterministic=kernel in tiles.REPEATABLE):
                yield "hopper" if kernel in tiles.ON_HOPPER else "triton", launched
    finally:
        tuned.ask(None)
        cache.forget()


def takes(candidate: Candidate, launched: Collection[tuple]) -> bool:
    """Whether what was launched is by a candidate."""
    names = {name for name, *_ in launched}
    if candidate.kernel in tuned.KERNELS:
        return (candidate.kernel, *candidate.form[:4]) in launched  # type: ignore[index]
    return candidate.kernel in names if candidate.kernel in tiles.ON_HOPPER else {"dq", "dkdv"} <= names


def computed(case: Case, tensors: dict, options: dict, names: Collection[str], backend: str) -> dict[str, torch.Tensor]:
    """{name: tensor} of out, lse, and those of the gradients that are named; no other is computed."""
    wanted = [name for name in INPUTS if name in names]
    inputs = {name: tensors[name].detach().requires_grad_(name in (wanted or INPUTS)) for name in INPUTS}
    out, lse = attention(**{**options, **inputs}, return_lse=True, backend=backend)
    got = dict(out=out.detach(), lse=lse.detach())
    grads = _of_results(case)
    if wanted:
        given = {"out": (out, tensors["out"].to(out.dtype)), "lse": (lse, tensors["lse"].to(lse.dtype))}
        results, incoming = zip(*(pair for name, pair in given.items() if name in grads), strict=True)
        got |= dict(zip(wanted, torch.autograd.grad(results, [inputs[name] for name in wanted], incoming), strict=True))
    return got


def _of_results(case):
    """The results of a named case that have gradients here."""
    return "out" if case.grads == "out" else "out and lse"


def judged(case: Case, names: Collection[str], backend: str, device: str, dtype: torch.dtype) -> dict[str, Verdict]:
    """{name: Verdict} of what `computed` gives."""
    tensors, options = case.draw(device, dtype)
    got, grads = computed(case, tensors, options, names, backend), _of_results(case)
    eager = with_gradients(reference.eager, tensors, options, grads, learned=())
    exact = options | in_float64({name: x for name, x in options.items() if name in LEARNED})
    oracle = with_gradients(reference.attention, in_float64(tensors), exact, grads, learned=())
    return verdicts(got, {name: eager[name] for name in got}, {name: oracle[name] for name in got})


def repeats(case: Case, names: Collection[str], backend: str, device: str, dtype: torch.dtype) -> bool:
    """Whether gradients have the same bits each time, where more programs add to dq than a GPU has room for at once."""
    tensors, options = case._replace(batch=BATCHES).draw(device, dtype)
    first, *others = (computed(case, tensors, options, names, backend) for _ in range(REPEATS))
    return all(torch.equal(other[name], first[name]) for other in others for name in names)


def prove(candidate: Candidate, backend: str, device: str, at, launched: set, few: bool) -> Candidate:
    """The candidate, held to float64 on the named cases of its load whose calls take it; if few, on some of them."""
    dtype, names = getattr(torch, candidate.dtype), RESULTS[candidate.kernel]
    proved = 0
    for case in CASES:
        if load_of(case) != candidate.load or (few and candidate.load == "plain" and case.name not in FEW):
            continue
        at(case.name)
        launched.clear()
        sized = case.at_width(candidate.width)._replace(rows=TIMES * case.rows, keys=TIMES * case.keys)
        try:
            found = judged(sized, names, backend, device, dtype)
        except NotImplementedError as refused:
            if candidate.kernel in tiles.ON_HOPPER and failures.known((candidate.kernel, torch.device(device))) is None:
                continue  # it takes some of the named cases
            return candidate._replace(status=UNFIT if "OutOfResources" in str(refused) else "fails", why=str(refused))
        if not takes(candidate, launched):
            continue
        proved += 1
        for name in names:
            if not found[name].ok:
                return candidate._replace(status="wrong", why=f"{case.name}, {name}: {found[name].why}")
        if candidate.kernel in tiles.REPEATABLE and not repeats(sized, names, backend, device, dtype):
            return candidate._replace(status="wrong", why=f"{case.name}: it has not the same bits each time")
    if not proved:
        return candidate._replace(status=UNKNOWN, why="none of the named cases takes it")
    return candidate._replace(status=PASSED)


def measure(candidate: Candidate, backend: str, device: str, at, launched: set, cases) -> Candidate:
    """The candidate, with the milliseconds that it takes for each of the cases that are by it."""
    ms, names = {}, RESULTS[candidate.kernel]
    for name, fields in cases.items():
        at(name)
        case = bench_cases.Case(*fields)
        tensors = case.draw(device)
        leaves = dict(query=tensors.query, key=tensors.key, value=tensors.value)
        wanted = [leaf.requires_grad_() for key, leaf in leaves.items() if key in names] or [
            tensors.query.requires_grad_()
        ]
        options = case.arguments(tensors.masks)

        def forward(leaves=leaves, options=options):
            return attention(**leaves, **options, backend=backend)

        launched.clear()
        out = forward()

        def backward(out=out, wanted=wanted, given=tensors.grad_out):
            return torch.autograd.grad(out, wanted, given, retain_graph=True)

        step = forward if names[0] == "out" else backward
        step()
        if takes(candidate, launched):
            ms[name] = timing.measure(step, device, BUDGET_MS).p50
    return candidate._replace(ms=ms)


def measure_peer(candidate: Candidate, device: str, at, cases) -> Candidate:
    """The candidate, which is PyTorch's own, with the milliseconds that it takes for each of the cases."""
    peer, mode = candidate.kernel.split(" ")
    ms = {}
    for name, fields in cases.items():
        at(name)
        try:
            workload = engine.prepare(bench_cases.Case(*fields), device)
            with workload.step(mode, workload.setup(peer)) as step:
                ms[name] = timing.measure(step, device, BUDGET_MS).p50
        except Unsupported as refused:
            return candidate._replace(status="refused", why=str(refused))
    return candidate._replace(status=PASSED, ms=ms)


def answer(request: dict, at) -> Candidate:
    """The candidate of a request, with what became of it."""
    candidate = tuned.candidate_of(request["candidate"])
    known = tuned.choose(map(tuned.candidate_of, request["known"]))
    device = request["device"]
    try:
        if candidate.kernel in tuned.OF_PEERS:
            return measure_peer(candidate, device, at, request["cases"])
        with asked(candidate, known, device) as (backend, launched):
            if request["what"] == "prove":
                return prove(candidate, backend, device, at, launched, request.get("few", False))
            return measure(candidate, backend, device, at, launched, request["cases"])
    except Exception as error:  # whatever a candidate raises on somebody's GPU is what is wrong with it
        if engine.out_of_memory(error):
            return candidate._replace(status=UNKNOWN, why="there is too little memory for its cases")
        return candidate._replace(status="fails", why=f"{type(error).__name__}: {error}".partition("\n")[0][:300])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints is no answer

    def write(**line):
        print(json.dumps(line), file=answers, flush=True)

    write(at="the beginning")
    for line in sys.stdin:
        found = answer(json.loads(line), lambda what: write(at=what))
        broke = engine.broke(found.why)  # then the GPU takes no more work from this process
        write(status=found.status, why=found.why, ms=found.ms, ends=broke)
        if broke:
            return


if __name__ == "__main__":
    main()
