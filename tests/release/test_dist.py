"""Tests that the source archive and the wheel are complete, and the script that makes .venv."""

import importlib.util
import re
import runpy
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EPOCH = 1_700_000_001
MADE = {"PKG-INFO", "setup.cfg"}  # files that setuptools makes, like fusedattn.egg-info


@pytest.fixture(scope="module")
def dist():
    pytest.importorskip("setuptools", minversion="77")
    if not (ROOT / ".git").exists():
        pytest.skip("only a repository can be built")
    return runpy.run_path(str(ROOT / ".ci" / "dist.py"))


@pytest.fixture(scope="module")
def sources(dist):
    return set(dist["git"]("ls-tree", "-r", "--name-only", "HEAD").split())


@pytest.fixture(scope="module")
def made(dist, tmp_path_factory):
    return dist["once"](tmp_path_factory.mktemp("dist"), EPOCH)


def test_the_source_archive_has_all_that_the_repository_has(sources, made):
    sdist, _ = made
    with tarfile.open(sdist) as archive:
        entries = archive.getmembers()
    names = {entry.name.partition("/")[2] for entry in entries}
    assert {name for name in names if not name.startswith("fusedattn.egg-info/")} == MADE | sources
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in entries} == {(EPOCH, 0, 0, "")}
    assert {entry.mode for entry in entries} == {0o644, 0o755}, "whatever the umask of who built it"


def test_the_wheel_is_small_and_holds_the_packages_alone_and_asks_for_torch_and_triton(sources, made):
    _, wheel = made
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 1_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    info = wheel.name.replace("-py3-none-any.whl", ".dist-info")
    assert {name.split("/")[0] for name in names} == {"fusedattn", info}
    packages = "fusedattn/", "kernels/", "bench/"
    files = [name for name in sources if name.endswith(".py") and name.startswith(packages)]
    modules = {name if name.startswith("fusedattn/") else f"fusedattn/{name}" for name in files}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "fusedattn/py.typed" in names, "without it a type checker takes the package for untyped"
    assert f"{info}/licenses/LICENSE" in names and f"{info}/entry_points.txt" in names
    lines = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode().splitlines()
    needed = {line for line in lines if line.startswith("Requires-Dist") and "extra" not in line}
    assert needed == {"Requires-Dist: torch>=2.10", 'Requires-Dist: triton>=3.6; sys_platform == "linux"'}


def test_the_changelog_knows_the_version():
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "fusedattn" / "__init__.py").read_text(), re.M)[1]
    sections = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == ("Unreleased", "")
    assert "dev" in version or sections[1][0] == version
    assert all(date for _, date in sections[1:])


@pytest.mark.parametrize(
    "missing, folders", [({"venv"}, ["here"]), ({"ensurepip"}, []), ({"ensurepip", "pip"}, ["here"])]
)
def test_a_python_that_cannot_make_a_venv(missing, folders, tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / ".ci" / "setup_venv.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr(subprocess, "run", lambda command: pytest.fail("it must not be tried"))
    with pytest.raises(SystemExit, match="^make: python3 cannot make a venv; install it, .*python3-venv$"):
        script["make_venv"]("python3", folders)
