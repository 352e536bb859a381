"""Parser of PTX text into a Kernel: its parameters, registers, instructions and labels.

Debug information, pragmas and comments are dropped. Anything else that is unknown raises Unsupported.
"""

import re
from typing import NamedTuple

BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f16": 16, "f32": 32, "f64": 64}
BITS |= {f"{sign}{bits}": bits for sign in "us" for bits in (8, 16, 32, 64)}

_NO_CODE = re.compile(r"//.*|^[ \t]*\.(loc|file|pragma)\b.*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.(?:ptr|global|shared|const|align\s+\d+))*\s+(\w+)(?:\[(\d+)\])?"
)
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_IGNORED = re.compile(r"\.maxnreg[\s\d]*|[\s,()]+")  # text to skip before the body of an entry
_TOKEN = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w.]+):(?!:)|(?P<statement>[^;]*);)")
_BRACKETS = re.compile(r"[\[({]")
_NAME = re.compile(r"[%$\w.]+")
_GUARD = re.compile(r"@(!?)(\S+)\s+")


class Unsupported(NotImplementedError):
    """Error for PTX that the emulator does not know. The message has the line and its text."""


class Instruction(NamedTuple):
    line: int
    text: str
    guard: tuple | None  # (register, True if it is negated)
    op: str
    args: tuple


class Kernel(NamedTuple):
    name: str
    params: dict  # {name: bytes}
    registers: dict  # {name: type, such as b32}
    body: list  # an Instruction, or the name of a label, for each
    threads: int  # threads of a block


class _Scope:
    """Scope of a pair of braces. Names of inner scopes get a number, so that all names of a kernel differ."""

    def __init__(self, number, outer):
        self.number, self.outer, self.names = number, outer, set()

    def unique(self, name):
        if self.outer is None:
            return name
        return f"{name}__{self.number}" if name in self.names else self.outer.unique(name)


def split(text):
    """Return text split at the commas outside brackets, as a tuple."""
    if not _BRACKETS.search(text):  # most operands have no brackets
        return tuple(operand.strip() for operand in text.split(",")) if text else ()
    operands, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "[{(") - (char in "]})")
        if char == "," and not depth:
            operands.append(text[start:i].strip())
            start = i + 1
    return *operands, text[start:].strip()


def parse(ptx):
    ptx = _NO_CODE.sub("", ptx)  # this keeps the line numbers
    entry = _ENTRY.search(ptx)
    begin = ptx.index("{", entry.end())
    head = ptx[entry.end() : begin]
    params = {name: BITS[kind] // 8 * int(count or 1) for kind, name, count in _PARAM.findall(head)}
    threads = _THREADS.search(head)
    rest = _IGNORED.sub("", _THREADS.sub("", _PARAM.sub("", head)))
    if rest or threads is None:
        raise Unsupported(f"line {_line(ptx, begin)}: {rest or 'no .reqntid'}")
    registers, body = {}, []
    for line, text, scope in _statements(ptx, begin):
        _statement(line, text, scope, registers, body)
    return Kernel(entry[1], params, registers, body, int(threads[1]))


def _line(ptx, at):
    return ptx.count("\n", 0, at) + 1


def _statements(ptx, at):
    """Return [(line, text, scope)] of the statements after an opening brace. The text of a label ends with a colon.

    All names are declared before the caller sees a statement, because labels follow the branches to them.
    """
    statements, scope, scopes, line, last = [], None, 0, _line(ptx, at), at
    while token := _TOKEN.match(ptx, at):
        kind, start = token.lastgroup, token.start(token.lastgroup)
        text, at = token[kind], token.end()
        line, last = line + ptx.count("\n", last, start), start
        if text == "{":
            scope, scopes = _Scope(scopes, scope), scopes + 1
        elif text == "}":
            scope = scope.outer
            if scope is None:
                return statements
        elif kind == "label":
            scope.names.add(text)
            statements.append((line, text + ":", scope))
        else:
            text = " ".join(text.split())
            if text.startswith(".reg"):
                scope.names.update(split(text.split(None, 2)[2]))
            statements.append((line, text, scope))
    raise ValueError("the body has no end")


def _statement(line, text, scope, registers, body):
    """Add a declaration to `registers`, or an instruction or label to `body`."""
    text = _NAME.sub(lambda name: scope.unique(name[0]), text)
    if text.endswith(":"):
        body.append(text[:-1])
    elif text.startswith(".reg"):
        _, kind, names = text.split(None, 2)
        for name in split(names):
            prefix, many, count = name.rstrip(">").partition("<")  # %r<3> is %r0 to %r2
            registers |= dict.fromkeys([f"{prefix}{i}" for i in range(int(count))] if many else [name], kind[1:])
    elif text.startswith(".branchtargets"):  # the label before it is the name of the table
        body.append(Instruction(line, text, None, ".branchtargets", (body.pop(), *split(text.partition(" ")[2]))))
    elif text.startswith("."):
        raise Unsupported(f"line {line}: {text}")
    else:
        guard = _GUARD.match(text)
        op, _, operands = text[guard.end() if guard else 0 :].partition(" ")
        body.append(Instruction(line, text, guard and (guard[2], guard[1] == "!"), op, split(operands)))
