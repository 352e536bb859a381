"""Has mkdocstrings read the docstrings of this package, through griffe."""

import re
from pathlib import Path

import griffe

from . import docstrings

PAGES = Path(__file__).parent / "pages"


def documented() -> set[str]:
    """What the pages have an entry for: the names behind `:::`."""
    return {name for page in PAGES.rglob("*.md") for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)}


class HouseStyle(griffe.Extension):
    """Puts Markdown in the place of each docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.names = documented()

    def on_object(self, *, obj: griffe.Object, **others: object) -> None:
        if obj.docstring is None or not obj.path.startswith("fusedattn"):
            return
        module = obj.parent.path if obj.parent is not None else ""
        obj.docstring.value = docstrings.markdown(
            obj.docstring.value, _names(obj), lambda name: self._link(name, module)
        )

    def _link(self, name: str, module: str) -> str | None:
        """The entry that a name in a docstring means: as it is, of the same module or package, or of the package."""
        package = module.rpartition(".")[0]
        own = ("fusedattn.compat.torch", "fusedattn.distributed", "fusedattn.layers", "fusedattn.compat.flash_attn")
        places = [place for place in own if module.startswith(place) or package == place]
        if module.startswith("fusedattn.compat._"):
            places.append("fusedattn.compat.torch")
        candidates = [name, *(f"{place}.{name}" for place in places), f"fusedattn.{name}"]
        return next((x for x in candidates if x in self.names), None)


def _names(obj: griffe.Object) -> list[str]:
    """Names that begin an item of its docstring: of parameters, or of fields."""
    if obj.is_function:
        return [parameter.name for parameter in obj.parameters if parameter.name != "self"]
    if obj.is_class:
        init = obj.members.get("__init__")
        fields = [name for name, member in obj.members.items() if member.is_attribute and not name.startswith("_")]
        inits = [x.name for x in init.parameters if x.name != "self"] if init is not None and init.is_function else []
        return inits + fields
    return []
