"""Do sanitizers find anything; has each kernel the same bits each time?    python -m fusedattn.bench sanitize

Each tool runs in a process of its own, on small calls that launch every kernel: NVIDIA's compute-sanitizer, without
torch's pool of memory, in which an access past the end of a tensor meets another one; Triton's ConSan, which 3.9 has
and which compiles its checks into the kernels; and `repeats`, a call again and again, whose bits are compared while
others fill the GPU meanwhile. Exit status 1 if a tool finds something. Without a GPU: --list prints the commands, and
`repeats` runs on the CPU.
"""

import argparse
import contextlib
import functools
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import torch

import fusedattn as fa

TIMES = 1000
FOUND = 9  # exit status of compute-sanitizer where it finds something
MODULE = "fusedattn.bench"


class Call(NamedTuple):
    """A small call: its sizes, its options, and what is asked of it.

    kind: "dense", "packed", "cache" or "tangent". two_passes: the backward gives the same bits each time; otherwise dq
    is left out where bits are compared.
    """

    kind: str = "dense"
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    two_passes: bool = True
    backend: str = "triton"
    masks: bool = False
    bias: str | None = None  # "heads" or "keys", which the batch shares
    weights: bool = False
    options: dict = {}
    rows: int = 1  # of a cache, for each head


CALLS = {
    "forward, dq and dkdv": Call(),
    "one pass": Call(two_passes=False, options=dict(causal=True)),
    "masks and lists": Call(masks=True, weights=True),
    "gradient of a bias": Call(bias="heads", options=dict(softcap=3.0)),
    "a bias of keys, dropout": Call(bias="keys", dim=128, options=dict(dropout_p=0.2, seed=5)),
    "float32": Call(dtype=torch.float32, options=dict(window=(40, 9))),
    "wide": Call(dim=256, dtype=torch.float16),
    "odd widths": Call(dim=59, dtype=torch.float16),
    "packed": Call("packed", options=dict(causal=True)),
    "packed, one pass": Call("packed", two_passes=False),
    "cache": Call("cache"),
    "cache, 32 rows": Call("cache", rows=12),
    "cache, 64 rows": Call("cache", rows=24, options=dict(causal=True)),
    "tangent": Call("tangent", weights=True),
    "hopper": Call(backend="hopper", dim=128, options=dict(causal=True)),
    "hopper, one pass": Call(backend="hopper", dim=128, two_passes=False, options=dict(causal=True)),
    "hopper, one pass, wide": Call(backend="hopper", dim=256, two_passes=False, options=dict(causal=True)),
    "hopper, wide": Call(backend="hopper", dim=256, options=dict(causal=True)),
}


def _drawn(call, device):
    """(query, key, value) of two batches, two kv heads and four query heads, and options."""
    dice = torch.Generator(device).manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=dice, device=device).to(call.dtype)

    B, S, K, D = 2, 150, 333, call.dim
    if call.kind == "packed":
        inputs = normal(B * S, 4, D), normal(B * K, 2, D), normal(B * K, 2, D)
    else:
        rows = call.rows if call.kind == "cache" else S
        inputs = normal(B, 4, rows, D), normal(B, 2, K, D), normal(B, 2, K, D)
    options = dict(call.options)
    if call.masks:
        options["mask"] = torch.rand(B, 1, S, K, generator=dice, device=device) < 0.7
        options["key_mask"] = torch.arange(K, device=device)[None] < K - 50
    if call.bias is not None:
        options["bias"] = normal(1, 4, S, K) if call.bias == "heads" else normal(1, 4, 1, K)
    return inputs, options


def results(call, device, backend):
    """All results of a call, and its gradients, or what of them has the same bits each time."""
    inputs, options = _drawn(call, device)
    if call.kind == "tangent":
        directions = tuple(torch.ones_like(x) for x in inputs)
        asked = dict(return_lse=True, return_weights=call.weights, backend=backend)
        attend = functools.partial(fa.attention, **options, **asked)
        return [x for each in torch.func.jvp(attend, inputs, directions) for x in each]
    if call.kind == "cache":
        lengths = torch.tensor([300, 17], dtype=torch.int32, device=device)
        new = [x[:, :, : call.rows].clone() for x in inputs[1:]]
        return [
            *fa.attention_decode(
                *inputs, cache_seqlens=lengths, new_key=new[0], new_value=new[1], **options, return_lse=True,
                backend=backend,
            ),
            *inputs[1:],
        ]  # fmt: skip
    learned = [x.requires_grad_() for x in (*inputs, *([options["bias"]] if "bias" in options else []))]
    if call.kind == "packed":
        offsets = [torch.tensor([0, 7, n], dtype=torch.int32, device=device) for n in (len(x) for x in inputs[:2])]
        out, lse = fa.attention_varlen(*inputs, *offsets, **options, return_lse=True, backend=backend)
        found = [out, lse]
    else:
        asked = dict(return_lse=True, return_weights=call.weights, backend=backend)
        found = [*fa.attention(*inputs, **options, **asked)]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(call.two_passes, warn_only=True)
    try:
        grads = torch.autograd.grad(found[0], learned, torch.ones_like(found[0]))
    finally:
        torch.use_deterministic_algorithms(before)
    return [*(x.detach() for x in found), *(grads if call.two_passes else grads[1:])]


def bits(tensor):
    """A tensor as whole numbers, so that NaN equals itself."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@contextlib.contextmanager
def _busy(device):
    """Meanwhile another stream has the GPU multiply, so that programs do not run in the order they do alone."""
    if torch.device(device).type != "cuda":
        yield lambda: None
        return
    stream, x = torch.cuda.Stream(), torch.randn(512, 512, device=device)

    def multiply():
        with torch.cuda.stream(stream):
            torch.mm(x, x)

    yield multiply


def repeat(call, times, device, backend, compute=results):
    """What differs among so many calls of one kind: a line for the first that does, or ""."""
    first = [bits(x).clone() for x in compute(call, device, backend)]
    with _busy(device) as disturb:
        for number in range(1, times):
            if number % 3 == 0:
                disturb()
            for place, (x, want) in enumerate(zip(compute(call, device, backend), first, strict=True)):
                if not torch.equal(bits(x), want):
                    count = int((bits(x) != want).sum())
                    return f"result {place} of call {number + 1} differs from the first in {count} of {want.numel()}"
    return ""


def repeats(times, device, named, chosen):
    """Whether any of the calls has other bits another time; a line for each."""
    wrong = False
    for name in chosen:
        call = CALLS[name]
        backend = named or call.backend
        try:
            found = repeat(call, times, device, backend)
        except NotImplementedError as error:
            print(f"{name}: not run: {error}", flush=True)
            continue
        wrong |= bool(found)
        print(f"{name}: {found or f'{times} times the same bits'}", flush=True)
    return wrong


def commands(chosen, python=sys.executable):
    """{tool: (command, what the environment has besides)}; each runs the calls that are chosen, once or twice."""
    run = [python, "-m", MODULE, "sanitize", "repeats", "--times", "2", "--calls", *chosen]
    alone = dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    found = {}
    for tool, more in (("memcheck", ["--padding", "64"]), ("racecheck", []), ("initcheck", []), ("synccheck", [])):
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all", *more]
        found[tool] = ["compute-sanitizer", *options, *run], alone
    found["consan"] = run, dict(TRITON_INSTRUMENTATION_MODE="consan", TRITON_ALWAYS_COMPILE="1")
    return found


def _without(tool):
    """Why a tool cannot run here, or ""."""
    if not torch.cuda.is_available():
        return "it needs a GPU"
    if tool != "consan":
        return "" if shutil.which("compute-sanitizer") else "there is no compute-sanitizer"
    import triton

    major, minor = (int(x) for x in triton.__version__.split(".")[:2])
    return "" if (major, minor) >= (3, 9) else f"ConSan needs Triton 3.9, and this is {triton.__version__}"


def lend_memory():
    """Have Triton allocate by torch what instrumented kernels keep."""
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE} sanitize", description=__doc__.splitlines()[0])
    tools = [*commands([]), "repeats"]
    parser.add_argument("tools", nargs="*", help=f"by default all: {', '.join(tools)}")
    parser.add_argument("--times", type=int, default=TIMES, help="of `repeats`")
    parser.add_argument("--calls", nargs="*", choices=CALLS, default=[*CALLS])
    parser.add_argument("--backend", help="instead of what each call names")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for each tool")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    asked = parser.parse_args(arguments)
    if unknown := {*asked.tools} - {*tools}:
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    wrong = False
    for tool in asked.tools or tools:
        if tool == "repeats":
            if os.environ.get("TRITON_INSTRUMENTATION_MODE"):
                lend_memory()
            if asked.list:
                print(f"repeats: {asked.times} times in this process")
            else:
                wrong |= repeats(asked.times, asked.device, asked.backend, asked.calls)
            continue
        command, environment = commands(asked.calls)[tool]
        shown = " ".join([*(f"{name}={value}" for name, value in environment.items()), *map(repr, command)])
        if asked.list:
            print(f"{tool}: {shown}")
        elif why := _without(tool):
            print(f"{tool}: not run: {why}")
        else:
            print(f"{tool}: {shown}", flush=True)
            try:
                status = subprocess.run(command, env=os.environ | environment, timeout=asked.seconds).returncode
            except subprocess.TimeoutExpired:
                status = f"none within {asked.seconds:.0f} s"
            wrong |= status != 0
            print(f"{tool}: exit status {status}")
    return int(wrong)
