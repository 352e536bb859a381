"""What does skipping blocks save, and how near is it to the ideal?

Half of all tokens padding, a mask of 8 documents, a window of 1024 keys, in 16384 tokens. Times forward and backward,
with the masks as they are and with a plan of them, beside a call that hides nothing and FlexAttention with the same
block mask; and making that plan or mask.
"""

import contextlib

import torch
from fusedattn.bench import cases, engine, peers, report, rows
from fusedattn.bench.attention import Workload
from fusedattn.bench.calls import Unsupported

import fusedattn as fa

from . import questions

PROVIDERS = ("fusedattn", "fusedattn+plan", "flex")


class Plan(Workload):
    """What is computed of masks before the calls that have them."""

    def setup(self, name):
        tensors = self.case._replace(Hq=1, Hkv=1).draw(self.device)
        if name == "flex":
            return lambda: peers.block_mask(self.case, tensors)
        if not tensors.masks:
            raise Unsupported("there is no mask to plan")
        return lambda: fa.plan(**tensors.masks)

    @contextlib.contextmanager
    def step(self, mode, provider):
        yield provider

    def judge(self, mode, provider, result):
        return "", "", ""  # the call that has it is judged


def over_dense(written):
    """Lines of rows: the time of a case with options over that of our call of the same size that hides nothing."""
    timed = [row for row in rows.last_run(written) if row.ms_p50 != ""]
    dense = {(row.case, row.mode): row.ms_p50 for row in timed if not row.options and report.is_ours(row)}
    for row in timed:
        base = dense.get((row.case._replace(options=""), row.mode))
        if row.options and base:
            yield f"{row.case.name} {row.mode} {row.provider}: {row.ms_p50 / base:.2f} of dense"


def time_all(chosen, writer, machine, options):
    """Measure, a row in the CSV each; returns as `questions.run`."""
    every = list(dict.fromkeys([*chosen, *(case._replace(options="") for case in chosen)]))
    plans = engine.units(chosen, PROVIDERS[1:], ["plan"])
    calls = questions.units(every, PROVIDERS, ("forward", "backward"))
    return questions.run(calls, writer, machine, options) and questions.run(plans, writer, machine, options, Plan)


def main(arguments):
    options = questions.parser("skipping", "cases", "resume", "budget").parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    chosen = cases.TABLES[options.cases or ("skipping" if on_gpu else "tiny-skipping")]
    writer, machine = questions.opened(options)
    done = time_all(chosen, writer, machine, options)
    print(report.text(writer.rows, more=list(over_dense(writer.rows))))
    return 0 if done else questions.BROKEN
