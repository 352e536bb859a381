"""Translates a parsed PTX kernel to Python functions, one for each basic block.

`run(S, R, m)` executes a block for many lanes at once. S is the machine, R the list of registers, each an array with
one element a lane, and m the mask of active lanes. If all lanes are active, a second version
without m runs. Both return the next block: its number, -1 for the end, or a tuple that names a method of the machine.
"""

import re
from collections import Counter

import numpy as np

from . import ops
from .emit import TYPES, UNSIGNED, Emitter
from .parse import BITS

_ENDS = re.compile(r"(bra|brx|ret|mbarrier\.try_wait)\b|bar(rier)?\.sync\b")
_BEGINS = "mbarrier.try_wait"  # a wait that is not over repeats its basic block
_TYPE = re.compile(r"\.([su]\d+|f32|f64)\b")  # first match: type of the result, last: of the operands
_NAME = re.compile(r"[%\w.$]+")
_SPACE = vars(ops) | {dtype.__name__: dtype for dtype in TYPES.values()} | {"np": np}


class Program:
    """A PTX kernel cut into basic blocks; each is compiled to Python on first use.

    Attributes:
        kernel: the parsed Kernel. params: {name: bytes}. blocks: lists of instructions.
        index: {register: place in R}. width, home: by place, the bits and the stored dtype of a register.
        labels: {label: number of a block}. tables: {name of a branch table: labels}.
        polls: blocks that load a volatile number until it changes.
        jumps: {block: the block that it always jumps to}.
        used: registers that an instruction reads.
        grain: bytes of the smallest access to shared memory.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self.params = kernel.params
        self.index = {name: i for i, name in enumerate(kernel.registers)}
        self.width = [BITS[kind] for kind in kernel.registers.values()]
        self.blocks, self.labels, self.tables = _cut(kernel.body)
        instructions = [instruction for block in self.blocks for instruction in block]
        self.used = {name for each in instructions for name in re.findall(r"%[\w.$]+", _read_by(each))}
        self.grain = min([4, *map(_shared_bytes, instructions)])
        self.home = self._homes(instructions)
        self._functions = {}
        self.polls = set(filter(self._waits, range(len(self.blocks))))
        last = ((number, block[-1]) for number, block in enumerate(self.blocks))
        self.jumps = {n: self.labels.get(x.args[0]) for n, x in last if x.op.startswith("bra") and not x.guard}

    def _waits(self, block):
        volatile = any(".volatile" in each.op for each in self.blocks[block])
        return volatile and any(each.op == "bra" and self.labels[each.args[0]] == block for each in self.blocks[block])

    def _homes(self, instructions):
        """Return the dtype in which each register is stored: that of most of its uses, so that few uses need a view."""
        votes = [Counter() for _ in self.width]
        for each in instructions:
            kinds, product = _TYPE.findall(each.op), each.op.startswith(("mma", "wgmma"))
            for i, operand in enumerate(each.args if kinds else ()):
                kind = kinds[0 if i == 0 else -1]
                for place in (self.index[name] for name in _NAME.findall(operand) if name in self.index):
                    if BITS[kind] == self.width[place] and not (product and i in (1, 2)):
                        votes[place][TYPES[kind]] += 1000 if product else 1  # sums must be float32
        return [max(count, key=count.get, default=UNSIGNED[w]) for count, w in zip(votes, self.width, strict=True)]

    def function(self, block, masked):
        key = block, masked
        if key not in self._functions:
            emitter = Emitter(self, block, masked)
            code = compile(emitter.source(), f"<{self.kernel.name} block {block}{' masked' * masked}>", "exec")
            space = _SPACE | emitter.constants
            exec(code, space)
            self._functions[key] = space["run"]
        return self._functions[key]


def _cut(body):
    """Return the basic blocks, labels and branch tables of a kernel's body."""
    blocks, labels, tables = [[]], {}, {}
    for each in body:
        label = isinstance(each, str)
        if blocks[-1] and (label or each.op.startswith(_BEGINS)):
            blocks.append([])
        if label:
            labels[each] = len(blocks) - 1
        elif each.op == ".branchtargets":
            tables[each.args[0]] = each.args[1:]
        else:
            blocks[-1].append(each)
            if _ENDS.match(each.op):
                blocks.append([])
    return [block for block in blocks if block], labels, tables  # the last block may be empty


def _read_by(instruction):
    """Return the text of the operands that an instruction reads: all but the result, and the address of a store."""
    first, rest = instruction.args[:1], instruction.args[1:]
    return " ".join((*(instruction.guard or ())[:1], *(x for x in first if x.startswith("[")), *rest))


def _shared_bytes(instruction):
    """Return the bytes of an instruction's access to shared memory; 4 if it does not access it."""
    load_or_store = re.match(r"(ld|st)\..*shared.*\.[a-z]+(\d+)$", instruction.op)
    return int(load_or_store[2]) // 8 if load_or_store else 4
