"""What stands in the table: found by asking, or, of what needs a GPU, read in signatures and sources."""

import csv
import functools
import inspect
import pathlib
import warnings
from typing import NamedTuple

import torch

from fusedattn import compat

from . import packages
from .probes import Lacks, asked
from .rows import FEATURES, Feature

KEPT = pathlib.Path(__file__).parents[2] / "bench" / "results" / "features.csv"
OURS, SDPA, FLEX, FLASH = "fusedattn", "F.scaled_dot_product_attention", "FlexAttention", "flash-attn"
COLUMNS = OURS, SDPA, FLEX, FLASH
PYTORCH = "https://github.com/pytorch/pytorch/blob/001f694aef6f922b4fdf6d27d59162d27bf3df58/aten/src/ATen/native/"
TORCH = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/"
THEIRS = "https://github.com/Dao-AILab/flash-attention/blob/"
INTERFACE = f"{THEIRS}005300258a22e5fc6be621063c3d5704e82b89d9/flash_attn/flash_attn_interface.py"
CHECKS = f"{THEIRS}765fbd928364e298a38a5e4b5c540d30daa1aecb/csrc/flash_attn/flash_api.cpp"
BLOG = "https://pytorch.org/blog/flexattention-for-inference"
EFFICIENT = "_scaled_dot_product_efficient_attention"


class Cell(NamedTuple):
    """A word of `WORDS`, or several, and what tells."""

    word: str
    why: str = ""


def _link(text, address):
    return f"[{text}]({address})"


_LAYERS = _link("the kernels for nested tensors", f"{TORCH}nested/_internal/sdpa.py")
_GRADS = f"`{EFFICIENT}_backward` has a fourth gradient, of `attn_bias`"
_BIASES = f"{_link('trainable biases', BLOG)}"
# {package: {feature: who says that a GPU's kernel has what was refused here}}.
OFFERED = {
    SDPA: {
        "D and Dv that differ": _link("the efficient kernel", f"{PYTORCH}transformers/cuda/sdp_utils.cpp"),
        "gradient of the bias": _GRADS,
        "gradient of ALiBi's slopes": _GRADS,
        "dropout": f"`{EFFICIENT}` has `dropout_p`",
        "packed sequences": _LAYERS,
    },
    FLEX: {
        "gradient of the bias": _BIASES,
        "gradient of ALiBi's slopes": _BIASES,
        "lse": _link("`return_aux`", "https://docs.pytorch.org/docs/2.13/nn.attention.flex_attention.html"),
        "gradient through lse": _link("`grad_logsumexp`", f"{TORCH}_higher_order_ops/flex_attention.py"),
    },
}
# {feature: (function, its argument or "")} that flash-attn has, by its signatures.
ARGUMENTS = {
    "causal": ("flash_attn_func", "causal"),
    "causal where Sq < Sk, the last row seeing all": ("flash_attn_func", "causal"),
    "window": ("flash_attn_func", "window_size"),
    "grouped heads": ("flash_attn_func", ""),
    "rows that see nothing are 0, and their gradients": ("flash_attn_func", "causal"),
    "softcap": ("flash_attn_func", "softcap"),
    "ALiBi": ("flash_attn_func", "alibi_slopes"),
    "dropout": ("flash_attn_func", "dropout_p"),
    "lse": ("flash_attn_func", "return_attn_probs"),
    "packed sequences": ("flash_attn_varlen_func", "cu_seqlens_q"),
    "decoding from a cache in pages": ("flash_attn_with_kvcache", "block_table"),
    "`torch.compile(fullgraph=True)`": ("flash_attn_func", ""),
}
# {feature: a word that no argument of flash-attn has in it}.
NO_ARGUMENT = {
    "bool mask of any broadcast shape": "mask",
    "key padding mask": "mask",
    "padding may hold NaN": "mask",
    "additive bias of any broadcast shape": "bias",
    "gradient of the bias": "bias",
    "sinks and their gradient": "sink",
}
_FUNCTION = _link("an autograd.Function of forward and backward alone", INTERFACE)
# {feature: why flash-attn has it not, though no signature tells}.
NOT_THERE = {
    "training on a CPU": _link("its kernels take CUDA tensors", CHECKS),
    "float32": _link("float16 and bfloat16 alone", CHECKS),
    "D and Dv that differ": _link("v has the head dimension of q", INTERFACE),
    "gradient of ALiBi's slopes": _link("its backward gives None", INTERFACE),
    "gradient through lse": _link("its backward leaves that of lse out", INTERFACE),
    "weights and the gradient through them": _link("its own are for testing only", INTERFACE),
    "gradients by sample (`torch.func.vmap`)": _FUNCTION,
    "second derivatives": _FUNCTION,
    "forward mode (`torch.func.jvp`)": _FUNCTION,
}
WORDS = {
    "yes": "right, with gradients, and without memory for all pairs of a row and a key",
    "as a mask": "right, with gradients, but the caller makes a mask or bias of all pairs",
    "forward": "the output is right; its gradients need a GPU, and were not run",
    "formula": "right, with gradients, but by the formula, with memory for all pairs",
    "offered": "its signatures, documentation or sources have it for GPUs; not run, as there was none",
    "no": "refused, or no such argument",
    "wrong": "an answer that is not right",
}
_EXPERIMENTAL = _link("by a class among what is experimental", f"{TORCH}nn/attention/experimental/_paged_attention.py")
# What the answer of a package does not tell.
NOTES = {
    (SDPA, "padding may hold NaN"): "it does not promise it",
    (FLEX, "padding may hold NaN"): "it does not promise it",
    (FLEX, "decoding from a cache in pages"): _EXPERIMENTAL,
    (FLEX, "second derivatives"): _link("its backward has none", f"{TORCH}_higher_order_ops/flex_attention.py"),
}


def _asked(package, feature, forward=False):
    """(whether it answered, what is wrong with the answer or why there is none)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return True, asked(package, feature, forward)
    except (Lacks, RuntimeError, ValueError, TypeError) as error:  # NotImplementedError is a RuntimeError
        return False, str(error).strip().partition("\n")[0].strip()[:110]


def found(package, feature):
    """The Cell of a package that runs here, and a feature."""
    word, why = _answer(package, feature)
    notes = [why, NOTES.get((package.name, feature.name))]
    if word in ("no", "formula") and (who := OFFERED.get(package.name, {}).get(feature.name)):
        word = "offered" if word == "no" else f"{word}; offered"
        notes.append(who)
    return Cell(word, "; ".join(filter(None, notes)))


def _answer(package, feature):
    """(word, what is wrong or was refused) by asking alone."""
    refusals = []
    for word, inside in package.paths.items():
        with inside():
            answered, why = _asked(package, feature)
        if answered:
            mask = word == "yes" and package.name == SDPA and all(map(packages.needs_mask, feature.cases))
            return ("wrong", why) if why else ("as a mask" if mask else word, "".join(refusals[:1]))
        refusals.append(why)
    if feature.forward and package.name == FLEX:
        answered, why = _asked(package, feature, forward=True)
        if answered:
            return ("wrong", why) if why else ("forward", "")
        refusals = [why]
    return "no", refusals[0]


def read_of_flash_attn(feature):
    """The Cell of flash-attn and a feature, by its signatures and sources. Raises LookupError where they say other."""
    arguments = flash_attn_arguments()
    if feature.name in ARGUMENTS:
        function, argument = ARGUMENTS[feature.name]
        if function not in arguments or (argument and argument not in arguments[function]):
            raise LookupError(f"{function} has no {argument}")
        return Cell("offered", f"`{function}({argument})`" if argument else f"{_link(f'`{function}`', INTERFACE)}")
    if feature.name in NO_ARGUMENT:
        word = NO_ARGUMENT[feature.name]
        if any(word in name for names in arguments.values() for name in names):
            raise LookupError(f"flash-attn has an argument with {word} in its name")
        return Cell("no", f"no argument is a {word}")
    return Cell("no", NOT_THERE[feature.name])


def flash_attn_arguments():
    """{function: names of its arguments} of flash-attn, as `fusedattn.compat.flash_attn` keeps them."""
    names = [name for name in vars(compat.flash_attn) if name.startswith("flash_attn_")]
    return {name: set(inspect.signature(getattr(compat.flash_attn, name)).parameters) for name in names}


@functools.cache
def known(name):
    """The package of a column, None if it does not run here."""
    makers = {OURS: packages.ours, SDPA: lambda: packages.SDPA, FLEX: packages.flex, FLASH: packages.flash_attn}
    return makers[name]()


def find(name, feature: Feature):
    """The Cell of a column and a feature."""
    package = known(name)
    return read_of_flash_attn(feature) if package is None else found(package, feature)


def version(name):
    """What the cells of a column hold for; the last number of torch changes none."""
    if name == OURS:
        return ""
    return "2.8" if name == FLASH else "torch " + ".".join(torch.__version__.split(".")[:2])


def kept():
    """{(feature, package): (cell, why, version)} of the file."""
    with KEPT.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["feature"], row["package"]): (row["cell"], row["why"], row["version"]) for row in rows}


def keep():
    """Asks for everything, and writes the file."""
    with KEPT.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("feature", "package", "cell", "why", "version"))
        for feature in FEATURES:
            for name in COLUMNS:
                rows.writerow((feature.name, name, *find(name, feature), version(name)))
