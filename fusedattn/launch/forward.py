"""The forward: by the kernel for Hopper, or by the one for every GPU; and weights, from what it kept of each row."""

from triton import cdiv

from ..call.form import Call
from . import arguments, blocks, hopper, run, tiles


def _forward_on_hopper(out, lse, stats, call):
    """`forward` without weights, by the kernel for Hopper; it copies what the compiler passed on without asking."""
    call = call._replace(**{name: hopper.readable(getattr(call, name)) for name in ("query", "key", "value")})
    taken, device, target = hopper.pipeline(call), run.device_of(call.query), hopper.readable(out)
    assert target is out or run.current_recorder() is None, "what is recorded are launches: a copy would be lost"
    given = hopper.arguments(call, target, taken) | dict(Lse=lse, Stats=stats)
    registers, *_ = tiles.REGISTERS[taken.warpgroups]
    with run.surroundings(device):
        programs = hopper.programs(call, taken, run.multiprocessors(device))
        run.run_kernel("hopper", programs, given, device, num_warps=4, maxnreg=registers)
    if target is not out:
        out.copy_(target)


def _forward(out, lse, stats, call):
    """`forward` without weights, by the kernel for every GPU."""
    programs = call.query.shape[0] * call.key.shape[1]
    if arguments.packs(call, out) and programs >= run.multiprocessors(run.device_of(call.query)):
        call, out = arguments.packed(call, out)
    marks = blocks.marked(call)
    run.run_tiled(
        "forward",
        call,
        lambda tile: blocks.turns(call, tile.rows) * call.query.shape[1],
        arguments.common(call) | dict(Out=arguments.of(out), Lse=lse, Stats=stats),
        lambda tile: blocks.walks(call, *marks, tile),
    )


def forward(out, lse, weights, stats, call: Call, on_hopper: bool):
    """Fill out and, unless None, lse, weights and stats; weights need stats.

    on_hopper: out, lse and stats by the kernel for Hopper, which must have no reason not to take the call.
    """
    (_forward_on_hopper if on_hopper else _forward)(out, lse, stats, call)
    if weights is not None:
        common, columns = arguments.common(call), weights.shape[3]
        common.pop("V")
        run.run_tiled(
            "weights",
            call,
            lambda tile: blocks.turns(call, tile.rows) * cdiv(columns, tile.keys) * call.query.shape[1],
            common | dict(Weights=arguments.of(weights), Stats=stats, columns=columns),
            lambda tile: dict(sequences=blocks.sequences_of(call, tile.rows)),
        )
