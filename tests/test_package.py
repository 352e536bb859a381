"""Tests the imports between the folders (rooms) of the package, and the cost of `import fusedattn`."""

import ast
import graphlib
import json
from pathlib import Path

import pytest

from .conftest import run_python

ROOT = Path(__file__).parent.parent

# {room: the other rooms that it may import}
ROOMS = {
    "kernels": set(),
    "call": set(),
    "naive": {"call"},
    "launch": {"call", "kernels"},
    "cpu": {"call", "naive"},
    "operators": {"call", "cpu", "launch", "naive"},
    "dispatch": {"call", "cpu", "kernels", "launch", "naive", "operators"},
    "api": {"call", "dispatch", "operators"},
    "reference": {"api", "call", "dispatch", "naive"},
    "masks": {"call"},
    "plot": {"call"},
    "distributed": {"api", "call", "dispatch", "naive", "operators"},
    "layers": {"api", "call", "dispatch", "distributed"},
    "compat": {"api", "call", "dispatch", "layers", "naive", "operators"},
    "testing": {"api", "reference"},
    "bench": {"", "dispatch", "testing"},
}
# modules that import Triton at once; they are imported when a call first needs a kernel
LAUNCHES = {path.stem for path in ROOT.glob("fusedattn/launch/[!_]*.py")} - {"failures", "grids", "tile_table", "tuned"}
KNOWS_TRITON = {f"launch.{name}" for name in LAUNCHES}
ASKS_FOR_TRITON = {"dispatch.backends", "launch.tuned"}  # they ask for the version of Triton, if it is installed
KERNELS_KNOW = {"triton", "typing"}


def sources(folder):
    """Yield (dotted name, path) of each module in a folder, by the name under which it is installed."""
    package = "fusedattn" if folder == "fusedattn" else f"fusedattn.{folder}"
    for path in sorted((ROOT / folder).rglob("*.py")):
        inner = path.relative_to(ROOT / folder).with_suffix("").parts
        yield ".".join((package, *inner)).removesuffix(".__init__"), path


def imported(module, path, on_import=False):
    """Yield the dotted names that a file imports, or only those that it imports when it is imported itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if on_import:
        tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = [*above, *([node.module] if node.module else [])]
            yield from (".".join((*origin, alias.name)) for alias in node.names)


def within(name, package):
    return name == package or name.startswith(package + ".")


def test_kernels_import_triton_and_each_other_and_nothing_else():
    wrong = [
        f"{module} imports {name}"
        for module, path in sources("kernels")
        for name in imported(module, path)
        if name.split(".")[0] not in KERNELS_KNOW and not within(name, "fusedattn.kernels")
    ]
    assert not wrong


def test_kernels_take_at_most_20_parameters():
    nodes = [node for _, path in sources("kernels") for node in ast.walk(ast.parse(path.read_text()))]
    found = {node.name: len(node.args.args) for node in nodes if isinstance(node, ast.FunctionDef)}
    assert len(found) > 200 and max(found.values()) <= 20, max(found, key=found.get)


def inner_imports():
    """Return {module: modules of fusedattn that it ever imports}, without the prefix "fusedattn."."""
    modules = dict(sources("fusedattn")) | dict(sources("bench"))
    found = {}
    for module, path in modules.items():
        inner = found.setdefault(module.removeprefix("fusedattn."), set())
        for name in imported(module, path):
            if within(name, "fusedattn"):
                while name not in modules and not within(name, "fusedattn.kernels"):
                    name = name.rpartition(".")[0]
                inner.add(name.removeprefix("fusedattn").removeprefix("."))
    return found


def test_rooms_import_one_way():
    wrong = []
    for module, names in inner_imports().items():
        room = module.partition(".")[0]
        allowed = ROOMS.get(room, {*ROOMS, "cli", ""} - {"kernels"})  # default: top modules, cli
        wrong += [f"{module} imports {name}" for name in names if name.partition(".")[0] not in {room, *allowed}]
    assert not wrong


def test_no_import_goes_in_a_circle():
    graph = {
        module: names - {""} for module, names in inner_imports().items() if module not in ("fusedattn", "__main__")
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_triton_is_imported_late_and_in_two_rooms():
    late = ["triton", "fusedattn.kernels"]
    launches = [f"fusedattn.{name}" for name in KNOWS_TRITON]
    wrong = []
    for module, path in sources("fusedattn"):
        room = module.removeprefix("fusedattn.")
        if room in KNOWS_TRITON:
            continue
        ever, first = list(imported(module, path)), list(imported(module, path, on_import=True))
        if room not in ASKS_FOR_TRITON:
            wrong += [(module, name) for name in ever if any(within(name, package) for package in late)]
        wrong += [(module, name) for name in first if any(within(name, package) for package in (*late, *launches))]
    assert not wrong


IMPORT = """
import json, sys, time
begun = time.process_time()
import torch
before, finders = set(sys.modules), [*sys.meta_path]
start = time.process_time()
import fusedattn
share = (time.process_time() - start) / (start - begun)
assert sys.meta_path == finders and "torch.utils.flop_counter" not in sys.modules
added = sorted({name.split(".")[0] for name in set(sys.modules) - before})
x = torch.ones(1, 1, 4, 16)
fusedattn.attention(x, x, x)
assert "torch.distributed.tensor" not in sys.modules
print(json.dumps(dict(share=share, added=added)))
"""


def test_importing_adds_little_to_torch(tmp_path):
    found = json.loads(run_python("-c", IMPORT, cwd=tmp_path))
    assert not {"triton", "numpy", "rich", "matplotlib"} & set(found["added"])
    assert found["share"] <= 0.2  # of the CPU time that importing torch takes


def test_a_clone_in_which_nothing_is_installed_says_so():
    hidden = "import sys; sys.meta_path = [x for x in sys.meta_path if 'editable' not in str(x).lower()]"
    why = "fa.explain(*[torch.ones(1, 1, 2, 16)] * 3, capability=(9, 0)).reasons['triton']"
    assert "install -e" in run_python("-c", f"{hidden}; import torch, fusedattn as fa; print({why})", cwd=ROOT)


@pytest.mark.matrix
def test_launching_kernels_needs_no_numpy():
    pytest.importorskip("triton")
    quiet = "import sys, warnings; sys.modules['numpy'] = None; warnings.simplefilter('ignore')"
    run_python("-c", f"{quiet}; import fusedattn.launch.run", TRITON_INTERPRET=None)
