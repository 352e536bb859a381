"""What a user chooses attention by: each feature with the calls that ask for it.

An answer is right if results, and gradients of query, key, value and what is learned, are as good as the formula's in
eager PyTorch, measured against float64 (`fusedattn.testing.tolerance`).
"""

from typing import NamedTuple

from ..cases import Case


class Feature(NamedTuple):
    """A row of the table."""

    name: str
    short: str  # its name in the README, "" if it is not there
    cases: tuple[Case, ...]
    way: str = "call"  # a name of `probes.WAYS`
    grads: str = "out"  # the results that a loss is made of
    learned: tuple[str, ...] = ()  # the options that have a gradient
    forward: bool = True  # whether results alone, without gradients, say anything about it


def _case(**what):
    return Case("", **dict(Sq=17, Sk=19) | what)


def _shapes(option):
    return tuple(_case(B=2, **{option: shape}) for shape in ("batch", "heads", "keys"))


PLAIN = (_case(Sq=19),)
FEATURES = (
    Feature("training on a CPU", "training on a CPU", PLAIN, forward=False),
    Feature("float32", "", PLAIN),
    Feature("causal", "causal", (_case(Sq=19, causal=True),)),
    Feature("causal where Sq < Sk, the last row seeing all", "causal for Sq < Sk", (_case(Sq=11, causal=True),)),
    Feature("window", "window", (_case(Sq=19, window=(4, 2)), _case(window=(3, 0)))),
    Feature("grouped heads", "grouped heads", (_case(Hq=4, Hkv=2), _case(Hq=3, Hkv=1))),
    Feature("D and Dv that differ", "", (_case(Dv=8), _case(D=8, Dv=24))),
    Feature("bool mask of any broadcast shape", "bool mask", _shapes("mask")),
    Feature(
        "rows that see nothing are 0, and their gradients",
        "rows that see nothing are 0",
        (_case(mask="rank 2"), _case(Sq=19, Sk=11, causal=True)),
    ),
    Feature("key padding mask", "padding mask", (_case(B=2, key_mask="own"),)),
    Feature("padding may hold NaN", "", (_case(B=2, key_mask="own"),), way="padding"),
    Feature("additive bias of any broadcast shape", "bias", _shapes("bias")),
    Feature(
        "gradient of the bias",
        "gradient of the bias",
        (_case(B=2, bias="batch"), _case(bias="one a head")),
        learned=("bias",),
        forward=False,
    ),
    Feature("softcap", "softcap", (_case(softcap=1.5),)),
    Feature("ALiBi", "ALiBi", (_case(alibi="shared"), _case(B=2, alibi="own"))),
    Feature(
        "gradient of ALiBi's slopes",
        "of ALiBi's slopes",
        (_case(alibi="shared"),),
        learned=("alibi_slopes",),
        forward=False,
    ),
    Feature("sinks and their gradient", "sinks", (_case(sinks=True),), learned=("sinks",)),
    Feature("dropout", "dropout", (_case(Sq=16, Sk=16, dropout=0.25),), way="dropout"),
    Feature("lse", "", PLAIN, way="lse"),
    Feature("gradient through lse", "lse with a gradient", PLAIN, grads="out and lse", forward=False),
    Feature("weights and the gradient through them", "weights with a gradient", PLAIN, grads="out and weights"),
    Feature("packed sequences", "packed sequences", PLAIN, way="packed"),
    Feature("decoding from a cache in pages", "a cache in pages", PLAIN, way="cached"),
    Feature("`torch.compile(fullgraph=True)`", "`torch.compile(fullgraph=True)`", PLAIN, way="compiled"),
    Feature("gradients by sample (`torch.func.vmap`)", "gradients by sample", PLAIN, way="by_sample"),
    Feature("second derivatives", "second derivatives", PLAIN, way="second", forward=False),
    Feature("forward mode (`torch.func.jvp`)", "forward mode", PLAIN, way="tangent"),
)
