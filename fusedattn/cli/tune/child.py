"""The process that runs candidates, and dies in place of `fusedattn tune` if one of them kills it.

It reads a request a line, {"what", "device", "candidate", "known", ...}, and answers in lines: {"at": what it does now}
again and again, which says that it is alive, then {"status", "why", "ms", "ends"}. Its other output goes to stderr.
"""

import contextlib
import json
import os
import sys

import torch

from ...bench import cases as bench_cases, engine, timing
from ...bench.calls import Unsupported
from ...launch import tiles, tuned
from ...launch.tuned import PASSED, Candidate, Choices
from ...replay import cache
from ...testing.cases import CASES, Case, compare

# What a kernel is judged by, and which gradients it is timed on: of query, key and value.
RESULTS = {"forward": ("out", "lse"), "hopper": ("out", "lse"), "dq": ("query",), "dkdv": ("key", "value")}
RESULTS |= dict.fromkeys(("one_pass", "two_passes"), ("query", "key", "value"))
BUDGET_MS = 60.0


def load_of(case: Case) -> str:
    """The load of a named case, as `launch.tiles.tiles` has it."""
    if {"bias", "alibi_slopes"} & {*case.drawn} or {"softcap", "dropout_p"} & {*case.options}:
        return "rich"
    return "masked" if "mask" in case.drawn else "plain"


def alone(candidate: Candidate, known: Choices, table: tuple[tiles.Tile, ...]) -> Choices:
    """Choices with which calls take a candidate and nothing else in its place; elsewhere what is known to be best."""
    kernel, place = candidate.kernel, candidate.place
    right, wrong = {**known.right}, {**known.wrong}
    if candidate.form is not None:
        right[place] = (candidate.form,)
        wrong[place] = tuple(tiles.same(tile) for tile in table if tiles.same(tile) != candidate.form)
    in_two = kernel in ("dq", "dkdv", "two_passes")
    return Choices(right, wrong, two_passes=frozenset([candidate.place[1:]] if in_two else []))


@contextlib.contextmanager
def asked(candidate: Candidate, known: Choices, device: str):
    """Inside, calls take a candidate; yields the backend to name."""
    kernel, dtype, width, load = candidate.place
    table: tuple[tiles.Tile, ...] = ()
    if kernel in tuned.KERNELS:
        from ...launch import run

        itemsize = getattr(torch, dtype).itemsize
        table = tiles.candidates(kernel, run.capability(torch.device(device)), itemsize, width, load)
    tuned.ask(alone(candidate, known, table))
    cache.forget()
    try:
        yield "hopper" if kernel == "hopper" else "triton"
    finally:
        tuned.ask(None)
        cache.forget()


def prove(candidate: Candidate, backend: str, device: str, at) -> Candidate:
    """The candidate, held to float64 on each named case of its load."""
    dtype, judged = getattr(torch, candidate.dtype), RESULTS[candidate.kernel]
    proved = 0
    for case in CASES:
        if load_of(case) != candidate.load:
            continue
        at(case.name)
        try:
            verdicts = compare(case.at_width(candidate.width), backend, device, dtype)
        except NotImplementedError as refused:
            if candidate.kernel != "hopper":
                return candidate._replace(status="refused", why=str(refused))
            continue  # it takes some of the named cases
        proved += 1
        for name in judged:
            if name in verdicts and not verdicts[name].ok:
                return candidate._replace(status="wrong", why=f"{case.name}, {name}: {verdicts[name].why}")
    if not proved:
        return candidate._replace(status="refused", why="it takes none of the named cases")
    return candidate._replace(status=PASSED)


def measure(candidate: Candidate, backend: str, device: str, at, cases) -> Candidate:
    """The candidate, with the milliseconds that it takes for each of the cases."""
    from ... import attention

    ms, judged = {}, RESULTS[candidate.kernel]
    for name, fields in cases.items():
        at(name)
        case = bench_cases.Case(*fields)
        tensors = case.draw(device)
        leaves = dict(query=tensors.query, key=tensors.key, value=tensors.value)
        wanted = [leaf.requires_grad_() for key, leaf in leaves.items() if key in judged] or [
            tensors.query.requires_grad_()
        ]
        options = case.arguments(tensors.masks)

        def forward(leaves=leaves, options=options):
            return attention(**leaves, **options, backend=backend)

        out = forward()

        def backward(out=out, wanted=wanted, given=tensors.grad_out):
            return torch.autograd.grad(out, wanted, given, retain_graph=True)

        ms[name] = timing.measure(forward if judged[0] == "out" else backward, device, BUDGET_MS).p50
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
        with asked(candidate, known, device) as backend:
            if request["what"] == "prove":
                return prove(candidate, backend, device, at)
            return measure(candidate, backend, device, at, request["cases"])
    except Exception as error:  # whatever a candidate raises on somebody's GPU is what is wrong with it
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
