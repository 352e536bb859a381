"""Time and memory of plans beside FlexAttention's block masks: python -m fusedattn.bench.plans > rows.csv

Both build masks of `fusedattn.masks` on one CPU core; create_block_mask runs eager. Each row runs in a new process.
"""

import csv
import functools
import multiprocessing
import resource
import sys
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask

import fusedattn as fa

from .rows import commit

ROWS = 16384
PROVIDERS = {
    "fusedattn": lambda function, rows: fa.plan(function, rows=rows, keys=rows),
    "flex": lambda function, rows: create_block_mask(function, None, None, rows, rows, device="cpu"),
}


def patterns(rows):
    """Return {name: a mask function}: each of `fusedattn.masks`, and the usual compositions."""
    document = torch.arange(rows) * 20 // rows  # no boundary is a multiple of 64
    span = torch.where(document % 2 == 0, document, -1)
    table = torch.rand(rows // 128 + 1, rows // 128 + 1, generator=torch.Generator().manual_seed(0)) < 0.3
    return dict(
        causal=fa.masks.causal,
        window=fa.masks.and_(fa.masks.causal, fa.masks.sliding_window(1000, 0)),
        prefix=fa.masks.or_(fa.masks.causal, fa.masks.prefix(1000)),
        documents=fa.masks.documents(document),
        causal_documents=fa.masks.and_(fa.masks.causal, fa.masks.documents(document)),
        spans=fa.masks.or_(fa.masks.causal, fa.masks.spans(span)),
        dilated=fa.masks.and_(fa.masks.causal, fa.masks.dilated(7)),
        block_sparse=fa.masks.block_sparse(table, 128),
        anti_causal=fa.masks.not_(fa.masks.causal),
    )


def measure(name, provider, rows):
    """Build a mask. Return (CPU seconds, growth of peak RSS in MiB, bytes of the tensors that it keeps)."""
    torch.set_num_threads(1)
    make = functools.partial(PROVIDERS[provider], patterns(rows)[name])
    PROVIDERS[provider](patterns(256)[name], 256)  # a first call loads modules, so it is not timed
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    made = make(rows)
    seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tensors = made if isinstance(made, tuple) else vars(made).values()
    return seconds, (after - before) / 1024, sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def main():
    writer = csv.writer(sys.stdout)
    writer.writerow(("commit", "torch", "rows", "pattern", "provider", "seconds", "peak_mib", "kept_bytes"))
    for name in patterns(ROWS):
        for provider in PROVIDERS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, peak, kept = pool.apply(measure, (name, provider, ROWS))
            writer.writerow((commit(), torch.__version__, ROWS, name, provider, f"{seconds:.3f}", f"{peak:.1f}", kept))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
