"""Tests options, dtypes and layouts on Hopper kernels: alone with wide heads, and in calls that cover each pair."""

import itertools

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import tile_table

from ..cases import WIDTHS, cover
from . import calls
from .cases import BF16, FP16, HOPPER, dense

_LONG = dict(Sq=130, Sk=136)
_WIDE = {f"D {D} Dv {Dv}": dict(D=D, Dv=Dv) for D, Dv in WIDTHS}
FEATURES = {
    "D 64": dict(D=64, Dv=64, **_LONG), "D 128": dict(D=128, **_LONG), "D 80 Dv 24": dict(D=80, Dv=24, **_LONG),
    "D 256": dict(D=256), **_WIDE, "bf16": dict(dtype=BF16), "fp16": dict(dtype=FP16),
    "dense": dict(lengths=None), "packed": dict(B=3, lengths=((70, 0, 130), (100, 20, 136)), **_LONG),
    "in any order": dict(two_passes=False), "deterministic": dict(two_passes=True),
    "causal": dict(causal=True), "window": dict(window=(60, 20)), "top left": dict(align="top_left", window=(90, 1)),
    "mask of pairs": dict(mask="pairs"), "mask over heads": dict(mask="batch"),
    "plan": dict(mask="pairs", plan=True), "key mask": dict(key_mask="own"), "query mask": dict(query_mask="own"),
    "negative scale": dict(scale=-0.4), "scale 0": dict(scale=0.0), "heads 4:2": dict(Hq=4, Hkv=2),
    "bias of pairs": dict(bias="pairs"), "bias over batch": dict(bias="heads"), "bias of rows": dict(bias="rows"),
    "bias of keys": dict(bias="keys"), "softcap": dict(softcap=1.5), "slopes": dict(alibi="own"),
    "sinks": dict(sinks=True), "dropout": dict(dropout=0.3), "weights": dict(grads="out, lse and weights"),
}  # fmt: skip


def _entry(fields, name=""):
    (entry,) = dense((name, dict(B=2, Sq=70, Sk=72, backend="hopper") | fields))
    return entry


def _on_hopper(fields):
    """Return how many passes (forward, backward) Hopper kernels take of a call that names "hopper"; 0 raises."""
    given, D = {name for name, x in fields.items() if x}, fields.get("D", 64)
    width = max(D, fields.get("Dv", D))
    never = {"alibi", "dropout"} if width > 192 else set()  # beside a mask
    if D == fields.get("Dv") == 512 and fields.get("bias") != "rows":
        never.add("bias")
    if "plan" in given:  # made of such masks
        never |= {"key_mask", "query_mask"}
    if "mask" in given and given & never:
        return 0
    most = 5 if width > 256 else 1 if width > 128 else 3 - ({"bias", "mask"} <= given) if width > 64 else 4
    count = len(given & {"softcap", "alibi", "bias", "dropout", "mask"})
    return 1 if fields.get("bias") == "rows" and width <= 256 or count > most or "grads" in given else 2


def _calls():
    """Yield calls that cover all pairs, and each feature with wide heads and nothing else."""
    alone = [name for name, fields in FEATURES.items() if "D" not in fields and _entry(fields) != _entry({})]
    for names in (*cover(7, FEATURES, _on_hopper), *itertools.product(_WIDE, alone)):
        fields = {name: x for each in names for name, x in FEATURES[each].items()}
        yield pytest.param(fields, id=", ".join(names).replace(" ", "_"))


@pytest.mark.matrix
@pytest.mark.parametrize("fields", _calls())
def test_options_on_hopper(fields, monkeypatch):
    monkeypatch.setattr(tile_table, "COPIED_LENGTH", 1)  # heads of 257 columns
    outcome = calls.execute(_entry(fields), HOPPER)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    special = [x.name for x in outcome.device.launches if x.kernel.src.fn.is_gluon()]
    assert special[0] == "forward" and len(special) >= _on_hopper(fields)
