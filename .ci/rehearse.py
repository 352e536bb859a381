"""Installs the built package from a local index, and uses it: python .ci/rehearse.py [--dist dist]

The index is a folder (PEP 503) with the files of `make dist`. pip installs the wheel, then the source archive, which is
also unpacked and runs its own tests. Both use a new venv that sees all packages of this Python but fusedattn, so
nothing is downloaded.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
OWN = re.compile(r"fusedattn|__editable__")
# Tests of the source archive: links, imports, one kernel.
SELF_TESTS = "tests/test_readme.py tests/kernels/test_merge.py tests/test_package.py"
SELF_TESTS += " -k 'not numpy and not importing_adds'"
OURS = "PYTHONPATH", "TRITON_INTERPRET"  # environment variables that users do not have


def index(dist, into):
    """Make an index with one project and return its URL. pip checks the digests of the files."""
    project = into / "simple" / "fusedattn"
    project.mkdir(parents=True)
    links = []
    for file in sorted(dist.iterdir()):
        shutil.copy(file, project)
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        links.append(f'<a href="{file.name}#sha256={sha}" data-requires-python="&gt;=3.10">{file.name}</a><br>')
    (project / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links) + "\n")
    (project.parent / "index.html").write_text('<!DOCTYPE html>\n<a href="fusedattn/">fusedattn</a>\n')
    return project.parent.as_uri()


def packages(into):
    """Make a folder with links to all packages of this Python but fusedattn."""
    into.mkdir()
    for folder in (pathlib.Path(name) for name in sys.path if name.endswith("-packages")):
        for entry in folder.iterdir():
            link = into / entry.name
            if not OWN.search(entry.name) and entry.suffix != ".pth" and not link.exists():
                link.symlink_to(entry)
    return into


def venv(folder, others):
    """Make a venv that also sees the packages in `others`, and return its Python."""
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    code = "import site; print(site.getsitepackages()[0])"
    own = call(python, "-c", code).strip()
    pathlib.Path(own, "others.pth").write_text(f"{others}\n")
    return python


def call(*command, what=None, cwd=ROOT):
    """Return the output of a command, and print its time; exit with its output if it fails."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"rehearse: {' '.join(map(str, command))} failed\n{done.stdout}{done.stderr}")
    if what:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)
    return done.stdout


def install(python, url, *options):
    pip = [python, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "-q", "--no-cache-dir"]
    call(*pip, "--index-url", url, *options, "fusedattn", what=" ".join(["pip install", *options, "fusedattn"]))


def wheel_works(scratch, others, url):
    python = venv(scratch / "by-wheel", others)
    install(python, url, "--only-binary", "fusedattn")
    empty = scratch / "empty"
    empty.mkdir()
    command = python.parent / "fusedattn"
    call(command, "info", cwd=empty, what="fusedattn info")
    where = call(python, "-c", "import fusedattn, fusedattn.kernels as k; print(k.__file__)", cwd=empty).strip()
    if not pathlib.Path(where).is_relative_to(scratch):
        sys.exit(f"rehearse: expected kernels from {scratch}, got {where}")
    check = "check", "--device", "cpu", "--case", "causal"
    call(command, *check, cwd=empty, what=" ".join(("fusedattn", *check)))
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (empty / "snippet.py").write_text(snippet)
    printed = call(python, "snippet.py", cwd=empty, what="the example of the README")
    if not printed.startswith("takes "):
        sys.exit(f"rehearse: the example of the README printed {printed!r}")


def source_works(scratch, others, url, dist):
    python = venv(scratch / "by-source", others)
    install(python, url, "--no-binary", "fusedattn", "--no-build-isolation")
    (archive,) = dist.glob("fusedattn-*.tar.gz")
    shutil.unpack_archive(archive, scratch / "unpacked")
    (folder,) = (scratch / "unpacked").iterdir()
    bare = venv(scratch / "bare", others)  # the Makefile makes .venv from it
    what = "make interpreter in the unpacked archive"
    printed = call("make", "interpreter", f"PYTHON={bare}", f"ARGS=-q {SELF_TESTS}", cwd=folder, what=what)
    print(printed.strip().splitlines()[-1].strip("= "))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=pathlib.Path, default=ROOT / "dist", help="folder with sdist and wheel")
    dist = parser.parse_args().dist.resolve()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name).resolve()
        url, others = index(dist, scratch), packages(scratch / "packages")
        wheel_works(scratch, others, url)
        source_works(scratch, others, url, dist)


if __name__ == "__main__":
    main()
