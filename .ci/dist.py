"""Builds the source archive and the wheel of HEAD twice, and keeps them if equal: python .ci/dist.py [--into dist]

Times (SOURCE_DATE_EPOCH, or the commit's), order, owners and permissions of files depend only on the sources. The bytes
still depend on the versions of zlib and setuptools; releases use the setuptools of .ci/setuptools.txt.
"""

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Hide torch: pip builds the wheel without it.
BUILD = """
import sys
sys.modules["torch"] = None
from setuptools import build_meta
getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2])
"""
OTHER = dict(TZ="Pacific/Kiritimati", LC_ALL="C", PYTHONHASHSEED="7", HOME="/")  # environment of the second build


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def build(kind, source, into, seconds, **environment):
    """Build the sdist or wheel (`kind`) of a folder as pip does, with the same bytes each time."""
    into.mkdir()
    environment = os.environ | environment | {"SOURCE_DATE_EPOCH": str(seconds)}
    command = [sys.executable, "-c", BUILD, kind, str(into)]
    done = subprocess.run(command, cwd=source, env=environment, umask=0o022, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dist: {kind} failed\n{done.stdout}{done.stderr}")
    (made,) = into.iterdir()
    if kind == "sdist":
        rewrite(made, seconds)
    return made


def rewrite(path, seconds):
    """Rewrite a tar.gz with reproducible bytes: sorted files, no owners, one time, and one of two modes."""
    with tarfile.open(path) as archive:
        files = {entry.name: (entry.mode, archive.extractfile(entry).read()) for entry in archive if entry.isfile()}
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=seconds, fileobj=raw) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, (mode, content) in sorted(files.items()):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.mode = len(content), seconds, 0o755 if mode & 0o100 else 0o644
                archive.addfile(entry, io.BytesIO(content))


def once(scratch, seconds, **environment):
    """Build the source archive, and the wheel from it; return both."""
    scratch.mkdir(parents=True, exist_ok=True)
    git("archive", "--output", scratch / "source.tar", "HEAD")
    shutil.unpack_archive(scratch / "source.tar", scratch / "source")
    sdist = build("sdist", scratch / "source", scratch / "sdist", seconds, **environment)
    shutil.unpack_archive(sdist, scratch / "unpacked")
    (folder,) = (scratch / "unpacked").iterdir()
    return sdist, build("wheel", folder, scratch / "wheel", seconds, **environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=pathlib.Path, default=ROOT / "dist", help="folder for the files; emptied first")
    into = parser.parse_args().into.resolve()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="fusedattn-dist-"))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    made = once(scratch / "first", seconds)
    for one, other in zip(made, once(scratch / "somewhere" / "else", seconds, **OTHER), strict=True):
        if one.read_bytes() != other.read_bytes():
            sys.exit(f"dist: two builds of {one.name} differ; see {one} and {other}")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for one in made:
        shutil.copy(one, into)
        print(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}  {one.stat().st_size} bytes")
    shutil.rmtree(scratch)
    print("Both builds have the same bytes.")
    if git("status", "--porcelain"):
        print("dist: warning: uncommitted changes and files were left out")
    has = importlib.metadata.version("setuptools")
    if f"setuptools=={has} " not in (ROOT / ".ci" / "setuptools.txt").read_text():
        print(f"dist: warning: releases are built with another setuptools than {has}; see .ci/setuptools.txt")


if __name__ == "__main__":
    main()
