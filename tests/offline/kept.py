"""Keeps the Report of each compiled row, and finds it again while nothing that it was made from has changed.

A file a row in `.compiled_cache`, which `make clean` removes: a digest of all that a Report comes from, and the Report.
"""

import ast
import functools
import hashlib
import os
import pathlib
import pickle
import sys

import fusedattn.kernels
import torch
import triton

import fusedattn
from fusedattn.launch import run, tiles

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / ".compiled_cache"
KERNELS = pathlib.Path(fusedattn.kernels.__file__).parent
# From an operator to the launch, and what reads compiled code.
PACKAGE = pathlib.Path(fusedattn.__file__).parent
HOST = *(PACKAGE / room for room in ("call", "launch", "operators", "replay")), pathlib.Path(__file__).parent
TABLES = ("TABLE", "MASKED", "RICH", "CANDIDATES", "HOPPER")  # of tiles: a row has its own


def sources(path, root=KERNELS):
    """{path: text} of a module of kernels, and of every other one that it needs."""
    found, todo = {}, [path]
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = path.read_text()
            todo += _imported(path, found[path], root)
    return found


def _imported(path, text, root):
    """The files of the modules below `root` that a file there imports."""
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        above = package[: len(package) - node.level + 1] if node.level else ()
        module = node.module or ""
        if not node.level:
            if not f"{module}.".startswith("fusedattn.kernels."):
                continue
            module = module.removeprefix("fusedattn.kernels").removeprefix(".")
        origin = root.joinpath(*above, *filter(None, module.split(".")))
        for place in (origin, *(origin / alias.name for alias in node.names)):
            yield from filter(pathlib.Path.is_file, (place.with_name(f"{place.name}.py"), place / "__init__.py"))


def _without_tables(text):
    """The source of launch/tiles.py less its tables, so that a new tile compiles its own rows alone."""
    tree = ast.parse(text)
    names = [getattr(node, "targets", [None])[0] for node in tree.body]
    body = zip(tree.body, names, strict=True)
    return "\n".join(ast.dump(node) for node, name in body if getattr(name, "id", None) not in TABLES)


@functools.cache
def host():
    """A digest of the source of everything in HOST."""
    paths = [path for folder in HOST for path in sorted(folder.glob("*.py")) if not path.name.startswith("test_")]
    texts = {path: path.read_text() for path in [*paths, PACKAGE / "private.py"]}
    table = pathlib.Path(tiles.__file__)
    return _digest(texts | {table: _without_tables(texts[table])})


def _digest(what):
    return hashlib.sha256(repr(what).encode()).hexdigest()


class Kept:
    """Reports in a folder. read: as `compile_row` has it; root: where the kernels are."""

    def __init__(self, folder=FOLDER, read=False, root=KERNELS):
        self.folder, self.read, self.root = folder, read, root
        self._kernel = functools.cache(self._sources_of)

    def _sources_of(self, module):
        """A digest of the source of a kernel's module and of all that it imports."""
        place = self.root.joinpath(*module.removeprefix("fusedattn.kernels.").split("."))
        path = place / "__init__.py" if place.is_dir() else place.with_name(f"{place.name}.py")
        texts = sources(path, self.root)
        return _digest(sorted((str(path.relative_to(self.root)), text) for path, text in texts.items()))

    def digest(self, row):
        """Of a Row, its kernel's sources, what launches it and reads what it compiled to, and the versions."""
        kernel = self._kernel(run.KERNELS[row.kernel].fn.__module__)
        return _digest((row, self.read, kernel, host(), triton.__version__, torch.__version__, sys.version)).encode()

    def _path(self, row):
        return self.folder / _digest((row, self.read, triton.__version__))[:32]

    def find(self, row):
        """The Report of a Row, without `asm`; None if there is none, or what it was made from has changed."""
        path = self._path(row)
        if not path.exists():
            return None
        digest, _, report = path.read_bytes().partition(b"\n")
        return pickle.loads(report) if digest == self.digest(row) else None

    def keep(self, row, report):
        self.folder.mkdir(exist_ok=True)
        path = self._path(row)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(self.digest(row) + b"\n" + pickle.dumps(report._replace(asm={})))
        part.replace(path)
