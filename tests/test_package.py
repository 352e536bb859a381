"""The package: who imports whom, what `import fusedattn` costs, and what the wheel holds."""

import ast
import graphlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Floors, from the ground up: a room imports from the rooms that stand beside it here, and from no other.
ROOMS = {
    "kernels": set(),
    "call": set(),
    "naive": {"call"},
    "launch": {"call", "kernels"},
    "cpu": {"call", "naive"},
    "operators": {"call", "cpu", "launch", "naive"},
    "dispatch": {"call", "cpu", "kernels", "launch", "naive", "operators"},
    "api": {"call", "dispatch", "operators"},
    "reference": {"api", "call", "naive"},
    "tuning": {"dispatch", "launch"},
    "plot": {"call"},
    "distributed": {"api", "call", "dispatch", "naive", "operators"},
    "layers": {"api", "call", "dispatch", "distributed"},
    "compat": {"api", "call", "dispatch", "layers", "naive", "operators"},
    "testing": {"api", "reference"},
    "bench": {"", "dispatch", "testing"},
}
# What imports Triton before a call asks for it: the launches, and of them neither the tables of tiles nor the failures.
LAUNCHES = {
    f"launch.{x}"
    for x in (
        *("arguments", "backward", "blocks", "decode", "forward"),
        *("hopper", "interpreter", "launcher", "run", "tangent"),
    )
}
KNOWS_TRITON = {*LAUNCHES, "dispatch.recording"}
ASKS_FOR_TRITON = {"dispatch.backends", "launch.tuned"}  # whether it is there, and which version
KERNELS_KNOW = {"triton", "typing"}


def sources(folder):
    """(dotted name, path) of each module of a folder of the repository, by the name it is installed under."""
    package = "fusedattn" if folder == "fusedattn" else f"fusedattn.{folder}"
    for path in sorted((ROOT / folder).rglob("*.py")):
        inner = path.relative_to(ROOT / folder).with_suffix("").parts
        yield ".".join((package, *inner)).removesuffix(".__init__"), path


def imported(module, path, on_import=False):
    """Dotted names that a file imports: all of them, or those that importing the file imports."""
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


def inner_imports():
    """{module of fusedattn: the modules of fusedattn that it imports, at whatever time}, names without "fusedattn."."""
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
        allowed = ROOMS.get(room, {*ROOMS, "cli", ""} - {"kernels"})  # the public names, and the command line
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


def run(code, cwd, *arguments):
    """Return the output of `code` in a fresh Python in `cwd`, where it looks for packages first."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = """
import json, sys, time
import torch
before, finders = set(sys.modules), [*sys.meta_path]
start = time.perf_counter()
import fusedattn
seconds = time.perf_counter() - start
assert sys.meta_path == finders and "torch.utils.flop_counter" not in sys.modules
added = sorted({name.split(".")[0] for name in set(sys.modules) - before})
x = torch.ones(1, 1, 4, 16)
fusedattn.attention(x, x, x)
assert "torch.distributed.tensor" not in sys.modules
print(json.dumps(dict(seconds=seconds, added=added)))
"""


def test_importing_adds_little_to_torch(tmp_path):
    for _ in range(3):  # a busy machine only adds
        found = json.loads(run(IMPORT, tmp_path))
        assert not {"triton", "numpy", "rich", "matplotlib"} & set(found["added"])
        if found["seconds"] <= 0.3:
            return
    pytest.fail(f"{found['seconds']} s")


WITHOUT_TRITON = """
import json, sys
sys.modules["triton"] = None  # makes every import of it fail
import torch, fusedattn
query, key, value = torch.randn(3, 1, 2, 5, 4)
out = fusedattn.attention(query, key, value, causal=True)
from fusedattn.testing.tolerance import verdict
exact = fusedattn.reference.attention(query.double(), key.double(), value.double(), causal=True)
same = verdict(out, fusedattn.reference.eager(query, key, value, causal=True), exact).ok
same = same and torch.equal(out, fusedattn.attention(query, key, value, causal=True, backend="cpu"))
try:
    fusedattn.attention(query, key, value, backend="triton")
except NotImplementedError as error:
    print(json.dumps(dict(same=same, error=str(error))))
"""


def test_a_cpu_works_without_triton(tmp_path):
    got = json.loads(run(WITHOUT_TRITON, tmp_path))
    assert got["same"] and "Triton is not installed" in got["error"]


BUILD = """
import sys
sys.modules["torch"] = None
from setuptools import build_meta
getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2])
"""


def build(kind, source, into):
    """Run the build backend as pip does, without a network and with torch out of reach; the one file it made."""
    run(BUILD, source, kind, str(into))
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the source archive, so that one cannot lack what the other needs."""
    pytest.importorskip("setuptools", minversion="77")
    checkout, archive, unpacked, made = (
        tmp_path_factory.mktemp(name) for name in ("checkout", "sdist", "source", "wheel")
    )
    for name in ("fusedattn", "kernels", "bench", "tests"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.unpack_archive(build("sdist", checkout, archive), unpacked)
    (source,) = unpacked.iterdir()
    return build("wheel", source, made)


def test_the_wheel_is_small_and_holds_the_packages_alone_and_asks_for_torch_and_triton(wheel):
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 1_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    info = wheel.name.replace("-py3-none-any.whl", ".dist-info")
    assert {name.split("/")[0] for name in names} == {"fusedattn", info}
    modules = {
        ("" if folder == "fusedattn" else "fusedattn/") + path.relative_to(ROOT).as_posix()
        for folder in ("fusedattn", "kernels", "bench")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert "fusedattn/py.typed" in names, "without it a type checker takes the package for untyped"
    assert f"{info}/licenses/LICENSE" in names and f"{info}/entry_points.txt" in names
    lines = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode().splitlines()
    needed = {line for line in lines if line.startswith("Requires-Dist") and "extra" not in line}
    assert needed == {"Requires-Dist: torch>=2.10", 'Requires-Dist: triton>=3.6; sys_platform == "linux"'}


# Runs a module, without what an editable installation would find.
ALONE = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
del sys.argv[0]
import fusedattn, fusedattn.kernels
print(*fusedattn.__path__, *fusedattn.kernels.__path__, sep="\\n", file=sys.stderr)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_the_wheel_works_where_there_is_no_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "fusedattn", "bench", "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "QUESTION" in done.stdout, done.stderr
    where = [str(tmp_path / "fusedattn"), str(tmp_path / "fusedattn" / "kernels")]
    assert done.stderr.splitlines()[-2:] == where


@pytest.mark.matrix
def test_launching_kernels_needs_no_numpy():
    """Only the interpreter does; NumPy is not a dependency of ours, nor of torch."""
    pytest.importorskip("triton")
    quiet = "import sys, warnings; sys.modules['numpy'] = None; warnings.simplefilter('ignore')"
    program = f"{quiet}; import fusedattn.launch.run"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
