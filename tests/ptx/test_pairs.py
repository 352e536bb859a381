"""Tests pairs of options, sizes, dtypes and layouts on Hopper kernels, in a few calls that together have each pair."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from ..cases import cover
from . import calls
from .cases import BF16, FP16, HOPPER, dense

FEATURES = {
    "D 64": dict(D=64), "D 128": dict(D=128), "D 256": dict(D=256), "D 192 Dv 128": dict(D=192, Dv=128),
    "D 80 Dv 24": dict(D=80, Dv=24), "bf16": dict(dtype=BF16), "fp16": dict(dtype=FP16),
    "dense": dict(lengths=None), "packed": dict(B=3, lengths=((70, 0, 130), (100, 20, 136))),
    "in any order": dict(two_passes=False), "deterministic": dict(two_passes=True),
    "causal": dict(causal=True), "window": dict(window=(60, 20)), "top left": dict(align="top_left", window=(90, 1)),
    "mask of pairs": dict(mask="pairs"), "mask over heads": dict(mask="batch"),
    "key mask": dict(key_mask="own"), "query mask": dict(query_mask="own"), "negative scale": dict(scale=-0.4),
    "bias of pairs": dict(bias="pairs"), "bias over batch": dict(bias="heads"), "bias of rows": dict(bias="rows"),
    "bias of keys": dict(bias="keys"), "softcap": dict(softcap=1.5), "slopes": dict(alibi="own"),
    "sinks": dict(sinks=True), "dropout": dict(dropout=0.3),
}  # fmt: skip


def _entry(fields, name=""):
    (entry,) = dense((name, dict(B=2, Sq=130, Sk=136, backend="hopper") | fields))
    return entry


def _on_hopper(fields):
    """Return how many passes (forward, backward) Hopper kernels take of a call that names "hopper"; 0 raises."""
    given, width = {name for name, x in fields.items() if x}, fields.get("D", 64)
    count = len(given & {"softcap", "alibi", "bias", "dropout", "mask"})
    if width > 192 and "mask" in given and given & {"alibi", "dropout"}:
        return 0
    most = {64: 3, 128: 2}.get(width, 1)
    return 1 if fields.get("bias") == "rows" or count > most else 2


def _covering():
    for names in cover(7, FEATURES, _on_hopper):
        fields = {name: x for each in names for name, x in FEATURES[each].items()}
        yield pytest.param(fields, id=", ".join(names).replace(" ", "_"))


@pytest.mark.matrix
@pytest.mark.parametrize("fields", _covering())
def test_pairs_of_options_on_hopper(fields):
    outcome = calls.execute(_entry(fields), HOPPER)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    special = [x.name for x in outcome.device.launches if x.kernel.src.fn.is_gluon()]
    assert special[0] == "forward" and len(special) >= _on_hopper(fields)
