"""What attention over many GPUs sends, and when that hides behind its products.    python -m tests.offline.distributed

Predicted by fusedattn.distributed.forecast from the constants below; nothing is measured. With --report it writes
bench/results/distributed.md and, with matplotlib, the picture in it.
"""

import argparse
import functools
import itertools
import pathlib
from typing import NamedTuple

from fusedattn.distributed import cost, forecast
from fusedattn.distributed.cost import METHODS, Shape

PAGE = pathlib.Path(__file__).parents[2] / "bench" / "results" / "distributed.md"


PROSE = """\
# Attention over many GPUs: what is sent, and when it hides

**Predicted**, by `python -m tests.offline.distributed --report`; no GPU has measured any of it. The bytes are exact:
`tests/distributed/test_cost.py` counts what 2 and 4 processes send over gloo. The seconds are those of
`fusedattn/distributed/forecast.py` with the constants below. What a message or a launch costs however small it is, is
not in them: it adds to ring most, N messages a pass. N GPUs, S tokens, one causal sequence in bfloat16, heads of 128,
ring and gather balanced by zigzag.

## What a rank sends

| | forward | backward | what hides behind products |
|---|---|---|---|
| ring | its K and V to each rank that sees them | these again; float32 dK, dV to owners | all but the last gradients |
| gather | its K and V to all, padded to the largest shard | these again; float32 dK, dV to owners | nothing |
| ulysses | all but 1 / N of its q, k, v, output, lse | of gradients of all four | nothing |

Ring and gather send about S rows of K and V whatever N is, ulysses S / N rows of everything; there a key head goes to
each rank that needs it, and if there are several, its gradients are float32. Before each forward the ranks agree:
{words} bytes from each to rank 0, and {words} N back to each.

## Forward and backward of one layer

MB that a rank sends, and predicted ms, the least in bold; last, the products alone. A node has 8 GPUs, so 64 of them
talk over InfiniBand too.

{steps}

![Predicted time over that of the products alone]({picture})

## From how many rows of a rank on ring's transfer hides

A step of ring computes rows x rows pairs and receives rows. Last: the S that hides forward and backward, where all
transfer takes that link.

{hiding}

## Which to take

| where | take | because |
|---|---|---|
| N divides the heads | ulysses | sends least, works in one call on the whole, is balanced by itself |
| N does not, shards as long as the table says | ring, zigzag | links keep up, and two shards are all a rank holds |
| N does not, shorter shards | gather, zigzag | a shard crosses to each node once, with ring to each GPU of it |
| a window far shorter than a shard | ring, no balance | few see it; MB, {window} of 128k, N 8: {in_window} |
| a mask or a bias | ulysses, gather | ring takes none |
| documents of cu_seqlens | gather (varlen) | the others take none |
| memory is short | ulysses, ring | gather has K, V, float32 dK, dV of all: 1M tokens, 64 heads: {held} GiB |

Ring is before gather earlier than the table says: with Llama 3 8B on 64 GPUs from {crossing} tokens on.
Between nodes most of gather's backward is its all-to-all of float32 dK and dV: with 64 GPUs, 1M tokens and Llama 3 8B
{transfer} ms are transfer. A reduce-scatter, which crosses to a node once, would take {once} ms for these gradients.

## Constants

{constants}

A faster kernel hides less: the share of FlashAttention-3 is the strict case (ours: h200.csv). An all-gather
between nodes is predicted at 370 GB/s, and its source got 200, so gather may be slower there.
"""


class Constant(NamedTuple):
    """A number of the model, in words too, and who says so."""

    value: float
    what: str
    source: str


HOPPER = "data sheets of H100 and H200 SXM, as in https://glennklockwood.com/garden/processors/h100"
NCCL = "https://github.com/NVIDIA/nccl-tests/issues/"
PEAK = Constant(989e12, "bf16 products, dense: 989 TFLOP/s", HOPPER)
SHARE = Constant(
    0.75, "what a kernel reaches of it: 0.75", "FlashAttention-3, fp16 forward: abstract of arXiv:2407.08608"
)
MEMORY = Constant(3.35e12, "memory of an H100: 3.35 TB/s; an H200 has more", HOPPER)
NVLINK = Constant(
    370e9, "NVLink: 900 GB/s are 450 one way, of which NCCL gets 370", f"{HOPPER}; NCCL's maintainers, {NCCL}212"
)
INFINIBAND = Constant(
    48e9,
    "InfiniBand NDR, a link for each GPU: 400 Gb/s are 50 GB/s one way, of which NCCL gets 48",
    f"DGX H100 User Guide, 1.2.3; NCCL's maintainers, {NCCL}267 and {NCCL}290",
)
PCIE = Constant(64e9, "PCIe 5 x16: 128 GB/s are 64 one way, taken as reached", HOPPER)
NODE = Constant(8, "GPUs of a node: 8", "DGX H100 User Guide")
TOGETHER = Constant(
    1,
    "an all-gather uses the links of all GPUs of a node at once, an all-to-all and a message the GPU's own",
    f"{NCCL}267; an all-gather on 256 H100 at 200 GB/s, https://github.com/NVIDIA/nccl/issues/1218",
)
ADDED = Constant(
    1,
    f"memory for adding up parts, bytes an element: output {forecast.OUT_ADDED}, dq {forecast.QUERY_ADDED}, "
    f"dK and dV {forecast.KEYS_ADDED}",
    "counted in `operators/partial.py` and `distributed/ring.py`",
)
HEADS = Constant(1, "heads of the two models", "arXiv:2407.21783, table 3; arXiv:2302.13971, table 2")
CONSTANTS = PEAK, SHARE, MEMORY, NVLINK, INFINIBAND, PCIE, NODE, TOGETHER, ADDED, HEADS
SPEED = PEAK.value * SHARE.value
SPEEDS = forecast.Speeds(SPEED, MEMORY.value, NVLINK.value, INFINIBAND.value, int(NODE.value))
MODELS = {  # name: (query heads, key heads), of width 128
    "Llama 3 8B (32 heads, 8 of keys)": (32, 8),
    "LLaMA 65B (64 heads, 64 of keys)": (64, 64),
}
SIZES, LENGTHS = (8, 64), (2**15, 2**17, 2**20)
LONGER = [2**power for power in range(14, 21)]  # each twice the one before
WINDOW = 4096


def shape(heads, length, world, **more):
    """A causal call of one sequence, in bfloat16, balanced."""
    return Shape(1, length, *heads, 128, 128, 2, world, **(dict(balance="zigzag", causal=True) | more))


@functools.cache
def predicted(method, call):
    """(bytes that the rank with the most sends, seconds) of forward and backward; None where a method cannot."""
    if not cost.fits(method, call):
        return None
    flows = [cost.traffic(method, call, backward) for backward in (False, True)]
    return max(sum(map(sum, rows)) for rows in zip(*flows, strict=True)), forecast.step(method, call, SPEEDS)


def products(call):
    """Seconds that the products of forward and backward take, if all ranks have as many."""
    every = cost.operations(call._replace(world=1, balance=None), 0, 0)
    return every * (1 + cost.BACKWARD) / call.world / SPEED


def _table(names, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (names, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(names), *lines[1:]])


def _tokens(length):
    return f"{length // 1024}k" if length < 2**20 else f"{length // 2**20}M"


def _amount(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _steps():
    for (name, heads), world, length in itertools.product(MODELS.items(), SIZES, LENGTHS):
        call = shape(heads, length, world)
        found = {method: predicted(method, call) for method in METHODS}
        best = min((method for method in METHODS if found[method]), key=lambda method: found[method][1])
        sent = ["-" if one is None else _amount(one[0] / 1e6) for one in found.values()]
        times = ["-" if one is None else _amount(1e3 * one[1]) for one in found.values()]
        times = [f"**{text}**" if method == best else text for method, text in zip(METHODS, times, strict=True)]
        yield name.split(" (")[0], world, _tokens(length), *sent, *times, _amount(1e3 * products(call))


def hidden_from(heads, link, causal):
    """From how many rows of a rank on forward and backward of ring hide what goes over a link."""
    return max(_hidden(heads, link, causal))


def _hidden(heads, link, causal):
    call = shape(heads, 1, 1, causal=causal)
    return [forecast.hiding_rows(call, SPEED, link.value, backward) for backward in (False, True)]


def _hiding():
    links = {"NVLink": NVLINK, "InfiniBand": INFINIBAND, "PCIe 5": PCIE}
    for (name, heads), (link, speed), causal in itertools.product(MODELS.items(), links.items(), (False, True)):
        rows = [f"{round(x, -2):,.0f}" for x in _hidden(heads, speed, causal)]
        lengths = [f"{hidden_from(heads, speed, causal) * world / 1024:,.0f}k" for world in SIZES]
        yield name.split(" (")[0], link, "causal" if causal else "full", *rows, *lengths


def _is_before(first, second, call):
    return predicted(first, call)[1] < predicted(second, call)[1]


def text():
    """The page."""
    llama, large = MODELS.values()
    window = shape(llama, 2**17, 8, balance=None, window=(WINDOW, None))
    far = shape(llama, 2**20, 64)
    once = forecast.link(SPEEDS, forecast.of_rank(SPEEDS, 0, cost.gradients("gather", far)), gathers=True)
    names = *(f"{method} MB" for method in METHODS), *(f"{method} ms" for method in METHODS)
    return PROSE.format(
        words=8 * cost.WORDS,
        steps=_table(("model", "N", "S", *names, "products"), _steps()),
        picture=f"{PAGE.stem}.png",
        hiding=_table(("model", "link", "", "forward", "backward", *(f"S on {n} GPUs" for n in SIZES)), _hiding()),
        window=WINDOW,
        crossing=_tokens(next(length for length in LONGER if _is_before("ring", "gather", shape(llama, length, 64)))),
        in_window=", ".join(f"{method} {_amount(predicted(method, window)[0] / 1e6)}" for method in METHODS),
        held=" + ".join(f"{2 * large[1] * 128 * 2**20 * size / 2**30:.0f}" for size in (2, 4)),
        transfer=f"{1e3 * forecast.seconds('gather', far, SPEEDS, backward=True).transfer:.0f}",
        once=f"{1e3 * once:.0f}",
        constants=_table(("what", "source"), [constant[1:] for constant in CONSTANTS]),
    )


def draw():
    """The picture: the time of each method over that of the products alone, a panel for a model and many GPUs."""
    from fusedattn.bench import plots
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=110, facecolor="white", layout="constrained")
    colours = dict(zip(METHODS, (plots.OURS, *plots.OTHERS), strict=False))
    grid = figure.subplots(len(MODELS), len(SIZES), sharex=True, sharey=True)
    for axes, ((name, heads), world) in zip(grid.flat, itertools.product(MODELS.items(), SIZES), strict=True):
        for method, marker in zip(METHODS, "os^", strict=True):
            calls = [call for call in (shape(heads, length, world) for length in LONGER) if cost.fits(method, call)]
            times = [predicted(method, call)[1] / products(call) for call in calls]
            style = dict(color=colours[method], marker=marker, markersize=4, label=method)
            axes.plot([call.length for call in calls], times, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(LONGER, map(_tokens, LONGER))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(color=plots.GRID, linewidth=0.8)
        links = "NVLink" if world <= SPEEDS.node else "NVLink in nodes of 8, InfiniBand between"
        axes.set_title(f"{name}\n{world} GPUs, {links}", fontsize=9, color=plots.INK)
    for axes in grid[-1]:
        axes.set_xlabel("tokens", fontsize=9)
    grid[0, 0].legend(frameon=False, fontsize=9)
    figure.suptitle("Predicted: forward and backward, over the products alone", fontsize=11, color=plots.INK)
    return figure


def main(arguments=None):
    words = argparse.ArgumentParser(prog="python -m tests.offline.distributed", description=__doc__.splitlines()[0])
    words.add_argument("--report", action="store_true", help=f"write {PAGE.name} and its picture")
    if words.parse_args(arguments).report:
        PAGE.write_text(text())
        draw().savefig(PAGE.with_suffix(".png"))
    else:
        print(text())


if __name__ == "__main__":
    main()
