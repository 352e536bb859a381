"""The source archive and the wheel: reproducible and complete."""

import re
import runpy
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EPOCH = 1_700_000_001
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools, beside fusedattn.egg-info


@pytest.fixture(scope="module")
def dist():
    pytest.importorskip("setuptools", minversion="77")
    return runpy.run_path(str(ROOT / ".ci" / "dist.py"))


@pytest.fixture(scope="module")
def made(dist, tmp_path_factory):
    """Return ([sdist, wheel], the same built elsewhere)."""
    return dist["twice"](tmp_path_factory.mktemp("dist"), EPOCH)


def test_built_twice_they_are_the_same(made):
    for one, other in zip(*made, strict=True):
        assert one.name == other.name and one.read_bytes() == other.read_bytes()


def test_the_source_archive_has_all_that_the_repository_has(dist, made):
    (sdist, _), _ = made
    with tarfile.open(sdist) as archive:
        entries = archive.getmembers()
    names = {entry.name.partition("/")[2] for entry in entries}
    assert {name for name in names if not name.startswith("fusedattn.egg-info/")} == MADE | set(dist["sources"]())
    assert {(entry.mtime, entry.uid, entry.gid, entry.uname) for entry in entries} == {(EPOCH, 0, 0, "")}
    assert {entry.mode for entry in entries} == {0o644, 0o755}, "whatever the umask of who built it"


def test_a_module_that_git_does_not_know_is_not_forgotten(dist, monkeypatch, tmp_path):
    said = {"status": "", "ls-files": "fusedattn/new.py\n"}
    monkeypatch.setitem(dist["main"].__globals__, "git", lambda command, *options: said[command])
    monkeypatch.setattr("sys.argv", ["dist.py", "--into", str(tmp_path)])
    with pytest.raises(SystemExit, match="dist: git does not know fusedattn/new.py"):
        dist["main"]()


def test_the_changelog_knows_the_version():
    """A released version has a dated section below Unreleased."""
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "fusedattn" / "__init__.py").read_text(), re.M)[1]
    sections = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == ("Unreleased", "")
    assert "dev" in version or sections[1][0] == version
    assert all(date for _, date in sections[1:])
