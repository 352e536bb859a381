"""Makes Markdown of a docstring of this package, so that the reference is the docstrings and nothing else.

Their style is: one sentence, an example, prose, then sections (Args, Returns, Raises and so on) whose text begins in
the line of their name. Several arguments may share a line, and several lines an argument.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

SECTIONS = dict(Args="Arguments", Returns="Returns", Derivatives="Derivatives", Raises="Raises", Source="Source")
_SECTION = re.compile(rf"({'|'.join(SECTIONS)}):(?: +(.*))?$")
_CODE = re.compile(r"(`[^`]+`)")


def markdown(text: str, names: Sequence[str], link: Callable[[str], str | None] = lambda name: None) -> str:
    """A docstring, without its indentation, as Markdown.

    Args:
        names: those of parameters or fields, which begin an item where a colon follows.
        link: the identifier that a name in backticks links to, if any.
    """
    blocks = []
    for kind, lines in _blocks(text.splitlines()):
        if kind == "example":
            blocks.append("\n".join(("```pycon", *_dedented(lines), "```")))
        elif kind == "":
            blocks.append(_paragraph(lines, names, link))
        else:
            items = _arguments(_joined(lines), names, link)
            blocks.append(f"**{SECTIONS[kind]}:** {items[0]}" if len(items) == 1 else f"**{SECTIONS[kind]}:**")
            if len(items) > 1:
                blocks.append("\n".join(f"- {item}" for item in items))
    return "\n\n".join(blocks) + "\n"


def _blocks(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(kind, lines) of each part: "" is prose, "example" an example, everything else a name of SECTIONS."""
    blocks: list[tuple[str, list[str]]] = []
    kind = ""
    for line in lines:
        section, indented = _SECTION.match(line), line.startswith("    ")
        if section:
            kind = section[1]
            blocks.append((kind, [section[2]] if section[2] else []))
        elif indented and kind in SECTIONS and blocks:
            blocks[-1][1].append(line)
        elif not line.strip():
            kind = kind if kind in SECTIONS else "new"
        elif line.lstrip().startswith(">>>") or kind == "example":
            if kind != "example":
                blocks.append(("example", []))
            kind = "example"
            blocks[-1][1].append(line)
        else:
            if kind != "" or not blocks:
                blocks.append(("", []))
            kind = ""
            blocks[-1][1].append(line)
    return blocks


def _dedented(lines: Sequence[str]) -> list[str]:
    """Lines of an example, which is indented unless it is all that follows the first sentence."""
    return [re.sub(r" +# doctest: .*", "", line) for line in textwrap.dedent("\n".join(lines)).splitlines()]


def _joined(lines: Sequence[str]) -> list[str]:
    """Items of a section: a line that is indented further goes on with the one before."""
    least = min((len(x) - len(x.lstrip()) for x in lines if x.startswith(" ")), default=0)
    first_is_beside = bool(lines) and not lines[0].startswith(" ")
    items: list[str] = []
    for line in lines:
        if items and (first_is_beside or len(line) - len(line.lstrip()) > least):
            items[-1] += " " + line.strip()
        else:
            items.append(line.strip())
    return items


def _paragraph(lines: Sequence[str], names: Sequence[str], link: Callable[[str], str | None]) -> str:
    if lines[0].startswith("- "):
        items: list[str] = []
        for line in lines:
            if line.startswith("- "):
                items.append(line[2:])
            else:
                items[-1] += " " + line.strip()
        return "\n".join(f"- {_prose(item, link)}" for item in items)
    items = _arguments([" ".join(line.strip() for line in lines)], names, link)
    return items[0] if len(items) == 1 else "\n".join(f"- {item}" for item in items)


def _arguments(items: Iterable[str], names: Sequence[str], link: Callable[[str], str | None]) -> list[str]:
    """Each item, with the names of arguments as code; one that is about several arguments is cut where they begin."""
    cut = []
    begins = re.compile(rf"(?:^|(?<=[.;] ))((?:{'|'.join(map(re.escape, names))})(?:, \w+)*(?: \([^)]*\))?): ")
    for item in items:
        starts = [match.start(1) for match in begins.finditer(item)] if names else []
        starts = [0, *(start for start in starts if start)]
        for start, end in zip(starts, [*starts[1:], len(item)], strict=True):
            part = item[start:end].strip()
            match = begins.match(part) if names else None
            if match:
                code = ", ".join(f"`{name}`" for name in match[1].split(", "))
                part = f"{code}: {_prose(part[match.end() :], link)}"
            else:
                part = _prose(part, link)
            cut.append(part)
    return cut


def _prose(text: str, link: Callable[[str], str | None]) -> str:
    """Text whose backticks are code, linked where that is a public name, and whose other signs are themselves."""
    parts = []
    for part in _CODE.split(text):
        if part.startswith("`") and part.endswith("`") and len(part) > 2:
            name = part[1:-1]
            target = link(name.removesuffix("()"))
            parts.append(f"[{part}][{target}]" if target else part)
        else:
            part = part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            parts.append(re.sub(r"([*\[\]_\\])", r"\\\1", part))
    return "".join(parts)
