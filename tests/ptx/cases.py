"""Named calls of the package whose compiled PTX the tests execute."""

import itertools
from typing import NamedTuple

import torch

from .. import caches, cases
from ..caches import Cached
from ..cases import Case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = 90


class Entry(NamedTuple):
    """A named call to execute: a Case or a Cached, and options of the call and of the emulated GPU."""

    case: Case | Cached
    backend: str = "triton"
    two_passes: bool = False
    lengths: tuple | None = None  # (rows, keys) of packed sequences
    multiprocessors: int = 132
    times: int = 1  # number of calls; the third is a replay
    far: tuple | None = None  # (axis, elements between neighbours along it)
    tf32: bool = False  # float32 is multiplied as tf32
    forward_mode: bool = False  # tangents instead of gradients
    plan: bool = False  # the mask becomes a plan

    @property
    def name(self):
        return self.case.name

    def runs_on(self, capability):
        return self.backend != "hopper" or capability == HOPPER


def _case(name, dtype=BF16, **fields):
    sizes = dict(Sq=150, Sk=200, D=64, Hq=2, Hkv=1) | fields
    sizes.setdefault("Dv", sizes["D"])
    return Case(name)._replace(dtype=dtype, **sizes)


def dense(*rows):
    """Yield Entries from (name, fields of a Case or of an Entry)."""
    for name, fields in rows:
        own = {key: fields[key] for key in fields if key in Entry._fields}
        yield Entry(_case(name, **{key: x for key, x in fields.items() if key not in own}), **own)


EVERYTHING = dict(B=2, causal=True, mask="pairs", key_mask="own", query_mask="own", bias="heads", alibi="own")
EVERYTHING |= dict(sinks=True, softcap=5.0, dropout=0.2, grads="out, lse and weights", Sq=130, Sk=140)
RICH = dict(bias="batch", alibi="own", softcap=5.0, grads="out, lse and weights", Sq=40, Sk=60)
OF_FP32 = dict(dtype=FP32, bias="batch", grads="out, lse and weights", Sq=40, Sk=60)
SHORT = dict(Sq=70, Sk=100)
UNDER_MASKS = dict(key_mask="own", dropout=0.2, **SHORT)
# Not for tangents: PyTorch gives each the memory layout of its input, and fills the gaps, too.
FAR = dict(far=(1, 2**31 + 64))  # a stride of 64 bits; the next two fit 32 bits, but their multiples do not
FAR_HEADS, FAR_ROWS = dict(far=(1, 2**30 + 64), Hq=3, Hkv=3), dict(far=(2, 2**23), Sq=300, Sk=260)
TWO, WIDE = dict(two_passes=True), dict(D=128)
BY_THREADS = dict(D=5, Dv=64)  # keys of 10 bytes are loaded one element at a time; values by cp.async

_PLAIN = dense(
    ("plain D64", {}),
    ("plain D64, two passes", TWO),
    ("plain D64 fp32 ieee", dict(dtype=FP32, **SHORT)),
    ("plain D64 fp32 ieee, two passes", dict(dtype=FP32, **SHORT, **TWO)),
    ("tf32 D64", dict(dtype=FP32, tf32=True)),
    ("tf32 D128 causal", dict(dtype=FP32, tf32=True, causal=True, **WIDE)),
    ("tf32 D128, dropout under masks", dict(dtype=FP32, tf32=True, **UNDER_MASKS, **WIDE)),
    ("plain D128", WIDE),
    ("plain D128, two passes", WIDE | TWO),
    ("plain D16", dict(D=16)),
    ("D5 Dv24 strided", dict(D=5, Dv=24, strided=True)),
    ("keys by threads", BY_THREADS),
    ("plain D256", dict(D=256, **SHORT)),
    ("tile edges", dict(Sq=128, Sk=128)),
    ("long, no tails", dict(Sq=256, Sk=512)),
    ("one row", dict(Sq=1, Sk=333)),
    ("one key, dropout", dict(Sq=133, Sk=1, dropout=0.3)),
    ("heads 4:1", dict(Hq=4, Sq=70)),
    ("strided", dict(strided=True)),
    ("far apart", FAR | SHORT),
    ("heads far apart", FAR_HEADS | SHORT),
    ("rows far apart", FAR_ROWS),
    ("plain, a repeated call", dict(times=3)),
)
_BANDS = dense(
    ("causal", dict(causal=True)),
    ("causal D128", dict(causal=True, **WIDE)),
    ("more rows than keys, causal", dict(causal=True, Sq=260, Sk=70)),
    ("window", dict(window=(40, 20), Sq=300, Sk=300)),
    ("window, two passes", dict(window=(40, 20), Sq=300, Sk=300, **TWO)),
    ("window D128, two passes", dict(window=(40, 20), Sq=300, Sk=300, **WIDE, **TWO)),
    ("window D256", dict(window=(40, 20), D=256, Sq=100, Sk=120)),
    ("window and mask of pairs", dict(window=(40, 20), mask="pairs")),
    ("window and softcap, two passes", dict(window=(40, 20), softcap=1.5, **TWO)),
    ("window and softcap D128", dict(window=(40, 20), softcap=1.5, **WIDE)),
    ("window and softcap D256", dict(window=(40, 20), softcap=1.5, D=256, **SHORT)),
    ("top left", dict(align="top_left", window=(30, 1))),
)
_OPTIONS = dense(
    ("key mask", dict(key_mask="own", B=2)),
    ("dropout under a key mask", dict(key_mask="own", dropout=0.3, B=2, **SHORT)),
    ("query mask", dict(query_mask="own", B=2)),
    ("mask of pairs", dict(mask="pairs")),
    ("mask in a plan, a repeated call", dict(mask="pairs", plan=True, times=3)),
    ("mask of pairs D256", dict(mask="pairs", D=256, **SHORT)),
    ("bias over batch (dbias)", dict(bias="heads", B=4, multiprocessors=16, **SHORT)),  # in two parts
    ("bias of rows", dict(bias="rows")),
    ("bias of keys", dict(bias="keys")),
    ("bias of keys D128", dict(bias="keys", **WIDE)),
    ("dropout", dict(dropout=0.3)),
    ("weights", dict(grads="out, lse and weights")),
    ("lse alone", dict(grads="lse")),
    ("softcap", dict(softcap=1.5)),
    ("slopes", dict(alibi="own", B=2)),
    ("sinks", dict(sinks=True)),
    ("negative scale", dict(scale=-0.4)),
    ("scale 0", dict(scale=0.0)),
    ("peaked", dict(spread=4.0)),
    ("far apart, two passes, masks", dict(key_mask="own", mask="pairs", **FAR, **TWO)),
    ("masks, a repeated call", dict(mask="pairs", key_mask="own", B=2, times=3)),
    ("everything", EVERYTHING),
    ("bias, slopes, cap, weights D128 fp16", RICH | dict(dtype=FP16, **WIDE)),
    ("bias, slopes, cap, weights D256", RICH | dict(D=256, **SHORT)),
    ("bias, weights fp32 D40, two passes", OF_FP32 | dict(D=40) | TWO),
    ("bias, weights fp32 D128, two passes", OF_FP32 | WIDE | TWO),
    ("bias, weights fp32 D256", OF_FP32 | dict(D=256)),
)
_TINY = dict(Sq=40, Sk=60)
_WIDE = dense(
    ("D512", dict(D=512, Sq=70, Sk=60)),
    ("everything D512", EVERYTHING | dict(D=512, **_TINY)),
    ("bias, weights fp32 D320", OF_FP32 | dict(D=320)),
    ("tf32 D512", dict(dtype=FP32, tf32=True, D=512, **_TINY)),
)
_LENGTHS = (70, 0, 130, 1, 33), (100, 20, 130, 64, 0)
_TOGETHER = dict(B=5, Sq=130, Sk=130, lengths=_LENGTHS)
_PACKED = dense(
    ("packed", _TOGETHER),
    ("packed causal", _TOGETHER | dict(causal=True)),
    ("packed window D128", _TOGETHER | dict(window=(30, 9), **WIDE)),
    ("packed, heads far apart", _TOGETHER | FAR_HEADS),
    ("packed, rows far apart", _TOGETHER | dict(far=(2, 2**24), causal=True)),
    ("packed masks", _TOGETHER | dict(key_mask="own", query_mask="own", mask="batch", bias="heads")),
)
_PACKED_HEADS = _TOGETHER | dict(causal=True, align="top_left", Hq=4, Hkv=2, D=80, Dv=80, dtype=FP16)
_CAPPED = dict(softcap=5.0, scale=-0.4, sinks=True, dtype=FP16)
_BIASED = dict(bias="pairs", alibi="own", window=(90, 20), key_mask="own", B=2, Hq=4, Hkv=2, Sk=304)
_DROPPED = dict(dropout=0.3, alibi="own", sinks=True, window=(90, 20), key_mask="own", B=2, Hq=4, Hkv=2, Sk=300)
_ROW_SUMS = dict(bias="rows", alibi="own", sinks=True, grads="out and lse")
_LATENT, _WIDE_HEADS = dict(D=192, Dv=128), dict(D=256, B=2, Hq=4, Hkv=2, Sk=208)
_ON_HOPPER = dense(
    *(
        (f"hopper {name}", fields | dict(backend="hopper"))
        for name, fields in (
            ("D64", {}),
            ("D128", WIDE),
            ("D256", dict(D=256)),
            ("D80 fp16", dict(dtype=FP16, D=80)),
            ("causal, two rows", dict(causal=True, Sq=2, Sk=70)),
            ("causal", dict(causal=True, Sq=300, Sk=300, multiprocessors=1)),  # pairs of blocks, as in the next case
            ("causal D128", dict(causal=True, Sq=300, Sk=333, multiprocessors=1, **WIDE)),
            ("window", dict(window=(40, 20), Sq=300, Sk=300, multiprocessors=2)),
            ("causal D256", dict(causal=True, D=256, Sq=102, Sk=122, multiprocessors=1)),
            (
                "slopes D256, top left",
                dict(
                    causal=True,
                    window=(20, None),
                    align="top_left",
                    D=256,
                    B=2,
                    alibi="own",
                    Sq=150,
                    Sk=100,
                    multiprocessors=1,
                ),
            ),
            ("softcap, a repeated call", dict(softcap=1.5, times=3)),
            ("softcap D128 causal, two passes", dict(softcap=1.5, causal=True, Sq=300, Sk=333, **WIDE | TWO)),
            ("softcap, sinks, scale, packed D128 fp16", _TOGETHER | WIDE | _CAPPED),
            ("slopes, packed top left, heads 4:2", _PACKED_HEADS | TWO | dict(alibi="own", softcap=5.0)),
            ("softcap D256 fp16", dict(softcap=1.5, D=256, causal=True, dtype=FP16, **SHORT)),
            ("slopes D128 causal", dict(alibi="own", causal=True, B=2, **WIDE)),
            ("sinks, packed", _TOGETHER | dict(sinks=True, window=(60, 0), **TWO)),
            (
                "query mask, packed",
                dict(B=3, Sq=70, Sk=130, lengths=((70, 0, 33), (100, 20, 130)), query_mask="own", alibi="own", times=3),
            ),
            ("sinks, query mask D256", dict(sinks=True, query_mask="own", B=2, D=256, **SHORT)),
            ("query mask, slopes, cap D128", dict(query_mask="own", B=2, alibi="own", softcap=5.0, scale=-0.4, **WIDE)),
            ("scale 0", dict(scale=0.0)),
            ("key mask, causal", dict(key_mask="own", B=2, Sq=300, Sk=330, causal=True, multiprocessors=2)),
            ("key mask, sinks D128", dict(key_mask="own", query_mask="own", B=2, sinks=True, Sk=600, **WIDE)),
            ("key mask D256 fp16", dict(key_mask="own", B=2, D=256, dtype=FP16, softcap=5.0, times=3, **SHORT)),
            ("key mask, packed", _TOGETHER | dict(key_mask="own", query_mask="own", alibi="own", window=(90, 0))),
            ("bias, causal D128", dict(bias="batch", B=2, causal=True, Sq=300, Sk=336, multiprocessors=2, **WIDE)),
            ("bias, key mask D128", dict(bias="pairs", key_mask="own", B=2, **WIDE)),
            ("bias of keys, cap D256", dict(bias="keys", softcap=5.0, D=256, **SHORT | dict(Sk=104))),
            ("bias of rows, a repeated call", dict(bias="rows", times=3)),
            ("bias of rows, sinks D128 causal", dict(bias="rows", sinks=True, causal=True, **SHORT, **WIDE)),
            ("bias of rows, slopes, packed", _TOGETHER | _ROW_SUMS),
            ("bias of rows, cap D128, two passes", dict(bias="rows", softcap=5.0, key_mask="own", **WIDE | TWO)),
            ("bias of rows D192 Dv128 fp16", _LATENT | dict(bias="rows", dtype=FP16, grads="out and lse", **SHORT)),
            ("bias of rows, packed D256", _TOGETHER | dict(bias="rows", causal=True, sinks=True, D=256)),
            ("bias, packed", _TOGETHER | dict(bias="pairs", Sk=136)),
            ("bias of keys, cap fp16", dict(bias="keys", softcap=5.0, dtype=FP16, B=2, Hq=4, Hkv=2, Sk=208, times=3)),
            ("bias, slopes, two passes", _BIASED | TWO),
            ("bias fp32, dropout D128", dict(bias="heads", bias_dtype=FP32, dropout=0.3, B=2, Sk=208, **WIDE)),
            ("bias fp32, dropout, packed", _TOGETHER | dict(bias="pairs", bias_dtype=FP32, dropout=0.3, Sk=136)),
            ("bias, splits", dict(bias="pairs", bias_dtype=FP32, Sq=70, Sk=1200)),
            ("mask, causal D128", dict(mask="batch", B=2, causal=True, Sq=300, Sk=330, multiprocessors=2, **WIDE)),
            ("mask, key mask, slopes", dict(mask="pairs", key_mask="own", query_mask="own", alibi="own", B=2)),
            ("mask of keys, a repeated call", dict(mask="keys", softcap=5.0, sinks=True, times=3)),
            ("mask of rows, bias D128", dict(mask="rows", bias="batch", B=2, window=(90, 20), **WIDE)),
            ("mask D256 fp16", dict(mask="heads", D=256, dtype=FP16, **SHORT)),
            ("mask, packed causal, two passes", _TOGETHER | dict(mask="heads", causal=True, **TWO)),
            ("mask, key mask D128, two passes", dict(mask="batch", key_mask="own", B=2, Sk=400, **WIDE | TWO)),
            ("mask, key mask D192", dict(mask="heads", key_mask="own", D=192, B=2, Sk=260, times=3)),
            ("mask, packed causal D256", _TOGETHER | dict(mask="heads", causal=True, Hq=4, Hkv=2, D=256)),
            ("key mask, packed window D256", _TOGETHER | dict(key_mask="own", mask="pairs", window=(60, 0), D=256)),
            ("slopes D256, heads 4:2", _WIDE_HEADS | dict(alibi="own", window=(60, 20))),
            ("dropout, key mask D256", _WIDE_HEADS | dict(dropout=0.3, key_mask="own", causal=True)),
            ("dropout, packed D192 Dv128", _LATENT | _TOGETHER | dict(dropout=0.3, Hq=4, Hkv=2)),
            ("bias, key mask D256, heads 4:2", _WIDE_HEADS | dict(bias="pairs", key_mask="own", causal=True)),
            ("bias of keys, key mask D256 fp16", _WIDE_HEADS | dict(bias="keys", key_mask="own", dtype=FP16)),
            ("bias, packed window D256", _TOGETHER | dict(bias="heads", window=(60, 9), D=256, Sk=136)),
            ("mask, packed D128", _TOGETHER | WIDE | dict(mask="batch", Hq=4, Hkv=2)),
            ("mask, dropout, splits", dict(mask="rank 2", dropout=0.3, Sq=70, Sk=1200)),
            ("dropout D128, packed", _TOGETHER | dict(dropout=0.3, causal=True, Hq=4, Hkv=2, **WIDE)),
            ("dropout, key mask", dict(dropout=0.3, key_mask="own", B=2, Sq=300, Sk=200, multiprocessors=2)),
            ("dropout, window of one key D128", dict(dropout=0.3, window=(0, 0), Sq=70, Sk=70, **WIDE)),
            ("dropout, splits", dict(dropout=0.3, softcap=5.0, B=2, Sq=70, Sk=1200, times=3)),
            ("dropout, options, two passes D128", _DROPPED | WIDE | TWO | dict(softcap=5.0)),
            ("key mask, splits", dict(key_mask="own", bias="keys", B=2, Sq=70, Sk=904, multiprocessors=16)),
            ("packed", _TOGETHER | dict(multiprocessors=3)),  # full: programs take several blocks
            ("packed causal D128", _TOGETHER | dict(causal=True, **WIDE)),
            ("packed D64, two passes", _TOGETHER | dict(window=(60, 0)) | TWO),
            ("packed D128", _TOGETHER | WIDE),
            ("packed top left, heads 4:2, D80 fp16, two passes", _PACKED_HEADS | TWO),
            ("packed window D256 fp16", _TOGETHER | dict(window=(30, 9), D=256, dtype=FP16)),
            ("window D136 Dv32 fp16", dict(window=(40, 20), dtype=FP16, D=136, Dv=32)),
            ("causal D192 Dv128", _LATENT | dict(causal=True, Sq=300, Sk=333, multiprocessors=1)),
            ("bias of float32 D160 Dv96", dict(bias="pairs", bias_dtype=FP32, causal=True, D=160, Dv=96, Sq=70)),
            ("splits D192 Dv128", _LATENT | dict(Sq=40, Sk=1200)),
            ("long", dict(Sq=150, Sk=1000, Hq=4, Hkv=2)),
            ("one row", dict(Sq=1, Sk=300)),
            ("heads in one tile", dict(Sq=9, Sk=300, B=2, Hq=8, Hkv=2, times=3)),
            ("far apart", dict(causal=True, **FAR)),
            ("D64, two passes", TWO),
            ("causal D128, two passes", dict(causal=True, Sq=300, Sk=333, **WIDE | TWO)),
            ("long, two passes", dict(dtype=FP16, Sq=300, Sk=600, **TWO)),
            ("window, two passes", dict(window=(200, 20), Sq=300, Sk=600, Hq=4, Hkv=2, **TWO)),
            ("causal D256, two passes", dict(causal=True, D=256, Sq=300, Sk=333, **TWO)),
            ("window D136 Dv32 fp16, two passes", dict(window=(40, 20), dtype=FP16, D=136, Dv=32, **TWO)),
            ("splits", dict(Sq=100, Sk=1200, Hq=4, Hkv=2, times=3)),  # the third call is a replay
            ("empty splits, causal D128", dict(causal=True, align="top_left", Sq=300, Sk=1200, **WIDE)),
            ("splits, slopes", dict(alibi="own", softcap=5.0, B=2, Sq=70, Sk=1200, Hq=4, Hkv=2)),
            # Three splits of two blocks of rows make three pairs, one for each program.
            ("splits in pairs, causal", dict(causal=True, Sq=128, Sk=3840, multiprocessors=3)),
            ("splits, window D256 Dv128", dict(window=(900, 0), D=256, Dv=128, Sq=70, Sk=1000)),
            ("many blocks a program", dict(Sq=400, Sk=150, Hq=4, Hkv=2, multiprocessors=3)),
            ("many blocks a program D64 Dv128", dict(Sq=300, Sk=90, Dv=128, multiprocessors=2)),
            ("D512 causal", dict(D=512, causal=True, Sq=150, Sk=170, multiprocessors=1)),
            ("window D320, heads 4:2", dict(D=320, window=(40, 20), Sq=200, Sk=210, Hq=4, Hkv=2, multiprocessors=2)),
            ("many blocks a program D128 Dv320", dict(D=128, Dv=320, Sq=150, Sk=200, multiprocessors=2)),
            ("splits D64 Dv512", dict(Dv=512, Sq=40, Sk=1200, times=3)),
            ("mask, key mask D320", dict(D=320, mask="heads", key_mask="own", Sq=70, Sk=300)),
            ("bias fp32 of keys D512", dict(D=512, bias="keys", bias_dtype=FP32, Sq=70, Sk=104)),
            ("bias, dropout D264", dict(D=264, Dv=264, bias="pairs", dropout=0.3, Sq=70, Sk=104)),
        )
    )
)
_MANY = dict(bias="heads", softcap=5.0, alibi="own", sinks=True, dropout=0.2, key_mask="own", mask="pairs")
_TANGENTS = dense(
    *(
        (f"tangent {name}", fields | dict(forward_mode=True))
        for name, fields in (
            ("D64", {}),
            ("D128 fp16", dict(dtype=FP16, causal=True, **WIDE)),
            ("D256", dict(D=256, **SHORT)),
            ("keys by threads", BY_THREADS | SHORT),
            ("D512", dict(D=512, **_TINY)),
            ("everything D320 Dv257", _MANY | dict(D=320, Dv=257, **_TINY)),
            ("fp32 D512", dict(dtype=FP32, D=512, **_TINY)),
            ("window", dict(window=(40, 20))),
            ("window D128", dict(window=(40, 20), **WIDE)),
            ("everything", _MANY | SHORT),
            ("fp32 D40", dict(dtype=FP32, D=40, Dv=24, **SHORT)),
            ("fp32 D128", dict(dtype=FP32, Sq=40, Sk=60, **WIDE)),
            ("fp32 D256", dict(dtype=FP32, D=256, Sq=40, Sk=60)),
        )
    )
)


def _decode():
    cache = dict(dtype=BF16, D=64, Dv=64, C=320, lengths=(17, 260))
    pages, wide = cache | dict(page=16), dict(D=128, Dv=128)
    many = dict(C=4096, lengths=(4000, 1111, 0), Hq=4, Hkv=1)
    of_32 = dict(Sq=11, Hq=4, Hkv=2, causal=True, new=11)
    of_64 = dict(Sq=18, Hq=6, Hkv=2, causal=True)
    fp32, widest = dict(dtype=FP32), dict(D=256, Dv=256)
    prefill = cache | dict(Sq=200, new=200, C=512, lengths=(0, 210), causal=True, sinks=True)
    latent = dict(dtype=BF16, Hq=16, Hkv=1, D=576, Dv=512, shared=True, C=120, lengths=(17, 100))
    for name, fields in (
        ("cache", cache),
        ("cache D128", cache | wide),
        ("pages of 16", pages),
        ("pages of 256", cache | dict(page=256, C=512)),
        ("cache, split and merged", cache | many),
        ("pages, split and merged D128", pages | many | wide),
        ("new keys", cache | caches.BOTH),
        ("new keys in pages", pages | caches.BOTH),
        ("turned", cache | dict(half=16, new=2, Sq=2, causal=True)),
        ("turned in neighbours", pages | dict(half=32, interleaved=True, new=2, Sq=2, causal=True)),
        ("decode_32", cache | of_32),
        ("decode_32, window", cache | of_32 | dict(window=(40, 0), causal=False)),
        ("decode_32 D128", cache | of_32 | wide),
        ("decode_32 D256", cache | of_32 | widest),
        ("decode_32 fp32", cache | of_32 | fp32),
        ("decode_32 fp32 D128", cache | of_32 | fp32 | wide),
        ("decode_32 fp32 D256", cache | of_32 | fp32 | widest),
        ("decode_64", cache | of_64),
        ("decode_64, keys by threads", cache | of_64 | BY_THREADS),
        ("decode_64 D128", cache | of_64 | wide),
        ("decode_64 D256", cache | of_64 | widest),
        ("decode_64 fp32", cache | of_64 | fp32),
        ("decode_64 fp32 D128", cache | of_64 | fp32 | wide),
        ("decode_64 fp32 D256", cache | of_64 | fp32 | widest),
        ("fp16 odd pages", pages | dict(page=7, C=322, dtype=FP16)),
        ("fp32", cache | fp32),
        ("fp32, split and merged D128", cache | many | fp32 | wide),
        ("fp32, split and merged D256", cache | many | fp32 | widest),
        ("D 256", pages | widest),
        ("D 576, shared pages, split and merged", latent | dict(page=16, C=1024, lengths=(900, 17), Hq=8)),
        ("decode_32 D 576, shared", latent | dict(Hq=32)),
        ("decode_64 D 576, shared", latent | dict(Hq=40, sinks=True, window=(40, 0))),
        ("decode_32 D 576 fp32", latent | fp32 | dict(Hq=32, shared=False)),
        ("decode_64 D 576, shared fp32", latent | fp32 | dict(Hq=40)),
        ("decode_64 D 512", cache | of_64 | dict(D=512, Dv=512)),
        ("prefill", cache | prefill | dict(alibi=True)),
        ("prefill D128, into pages", prefill | wide | dict(half=32, page=128, C=640, window=(100, 0))),
        ("prefill D256, turned", prefill | widest | dict(half=32, Hq=2)),
        ("prefill D512, into pages", prefill | dict(D=512, Dv=512, page=128, C=640, window=(100, 0))),
        ("prefill, query mask", cache | dict(Sq=130, C=256, lengths=(60, 256, 100), query_mask=True)),
        ("prefill, splits", cache | dict(Sq=130, C=2048, lengths=(1900, 700), softcap=5.0)),
        ("cache, far apart", cache | caches.BOTH | FAR),
        ("pages, far apart", pages | caches.BOTH | dict(far=(1, 2**27))),
        ("everything in pages", caches.EVERYTHING._asdict() | dict(dtype=BF16)),
    ):
        backend = "hopper" if "prefill" in name else "triton"
        far = fields.pop("far", None)
        yield Entry(Cached("")._replace(**fields | dict(name=f"decode: {name}")), backend, far=far)


_ALL = itertools.chain(_PLAIN, _BANDS, _OPTIONS, _WIDE, _PACKED, _decode(), _ON_HOPPER, _TANGENTS)
ENTRIES = {entry.name: entry for entry in _ALL}
# Each option of calls and of caches, with wide heads.
_ALONE = dict(plan=dict(mask="pairs", plan=True), packed=dict(B=3, lengths=((40, 0, 17), (30, 20, 60))))
WIDE_HEADS = [Entry(case._replace(**_TINY)) for case in cases.WIDE]
for (D, Dv), (name, fields) in itertools.product(cases.WIDTHS, _ALONE.items()):
    WIDE_HEADS += dense((f"{name}, D {D} Dv {Dv}", _TINY | dict(D=D, Dv=Dv) | fields))
WIDE_HEADS += [Entry(case._replace(name=f"decode: {case.name}")) for case in caches.WIDE]
# `make test` executes these: both backwards, each kernel, and each kind of instruction.
FEW = (
    *("window, two passes", "dropout under a key mask", "bias over batch (dbias)", "packed causal", "far apart"),
    *("decode: new keys in pages", "decode: cache, split and merged", "decode: prefill D128, into pages"),
    *("hopper window", "hopper slopes D256, top left", "hopper packed causal D128", "hopper causal, two rows"),
    *("hopper query mask, packed", "hopper key mask, splits", "hopper bias of rows, sinks D128 causal"),
)

# `make test-all` runs each named call for one GPU, and these for the other GPU, too. So it runs each first tile.
ALSO = {
    80: (
        *("bias of rows", "mask of pairs", "far apart, two passes, masks"),
        *("plain D64, two passes", "plain D128, two passes"),
        *("bias, weights fp32 D40, two passes", "bias, weights fp32 D128, two passes", "bias, weights fp32 D256"),
        *("decode: everything in pages", "decode: fp32", "decode: fp32, split and merged D128", "decode: D 256"),
        *("decode: decode_32", "decode: decode_32 D128", "decode: decode_32 fp32 D128"),
        *("decode: decode_64", "decode: decode_64 D128", "decode: decode_64 fp32 D256"),
        "everything D512",
        *("decode: decode_32 D 576 fp32", "decode: decode_64 D 576, shared fp32"),
        *("tangent D128 fp16", "tangent D256", "tangent fp32 D40", "tangent fp32 D128"),
    ),
    HOPPER: (
        *("bias, slopes, cap, weights D128 fp16", "bias, slopes, cap, weights D256"),
        *("bias of keys D128", "mask of pairs D256", "packed window D128", "plain D256"),
        *("window D128, two passes", "window and softcap D128", "window and softcap, two passes"),
        *("decode: cache D128", "decode: fp32, split and merged D256", "decode: decode_32, window"),
        *("decode: decode_32 fp32", "decode: decode_32 fp32 D256", "decode: decode_32 D256"),
        *("decode: decode_64 fp32", "decode: decode_64 fp32 D128", "decode: decode_64 D256"),
        *("tangent D64", "tangent fp32 D256", "tangent fp32 D512", "bias, weights fp32 D320"),
        *("decode: D 576, shared pages, split and merged", "decode: decode_32 D 576, shared"),
        *("decode: decode_64 D 576, shared", "decode: decode_32 D 576 fp32", "decode: decode_64 D 576, shared fp32"),
        *("keys by threads", "tangent keys by threads", "decode: decode_64, keys by threads"),
    ),
}
