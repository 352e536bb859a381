"""Writes the package as a repository for Hugging Face's `kernels` library: python .ci/hub.py [--into out/hub]

    README.md  LICENSE  benchmarks/benchmark.py  build/torch-cpu/  build/torch-cuda/

Each folder of build/ has the installed package without its commands. With `pip install kernels`,
`kernels.get_local_kernel(Path("out/hub"))` loads the build for this machine, and `kernels benchmark ./out/hub` times it
beside PyTorch.
"""

import argparse
import base64
import hashlib
import json
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "fusedattn"
LEFT_OUT = ("cli", "testing", "__main__.py")  # folders and files of the commands, which the repository leaves out
# Triton compiles at the first launch, for any compute capability from 8.0 on.
BACKENDS = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0+PTX"]}}
MINIMUM = "0.17.0"  # the version of the package `kernels` that this layout was tested with
# Functions that transformers and `kernels benchmark` call.
MORE = """
from .compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

__all__ += ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
"""


def package():
    """Return {path in the installed package: content} of the package without its commands."""
    files = {}
    for folder, inside in ((ROOT / "fusedattn", ""), (ROOT / "kernels", "kernels/")):
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            kept = path.suffix == ".py" or path.name == "py.typed"
            if kept and name.split("/")[0] not in LEFT_OUT and not path.is_symlink():
                files[inside + name] = path.read_bytes()
    files["__init__.py"] += MORE.encode()
    return files


def version():
    return re.search(r'^__version__ = "(\d+)\.', (ROOT / "fusedattn" / "__init__.py").read_text(), re.M)[1]


def metadata(files, backend):
    """Return the content of metadata.json. Its `id`, with a hash of the files, names the module and its torch.ops."""
    digests = {name: hashlib.sha256(content).digest() for name, content in sorted(files.items())}
    unique = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12]
    encoded = {name: base64.b64encode(digest).decode() for name, digest in digests.items()}
    about = {"name": NAME, "id": f"_{NAME}_{backend}_{unique}", "version": int(version()), "license": "Apache-2.0"}
    about |= {"kernels-minver": MINIMUM, "python-depends": [], "backend": BACKENDS[backend]}
    return about | {"digest": {"algorithm": "sha256", "files": encoded}}


def write(into):
    files = package()
    shutil.rmtree(into, ignore_errors=True)
    for backend in BACKENDS:
        variant = into / "build" / f"torch-{backend}"
        for name, content in files.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            (variant / name).write_bytes(content)
        (variant / "metadata.json").write_text(json.dumps(metadata(files, backend), indent=2) + "\n")
    (into / "benchmarks").mkdir()
    shutil.copy(ROOT / ".ci" / "hub_benchmark.py", into / "benchmarks" / "benchmark.py")
    (into / "README.md").write_text((ROOT / ".ci" / "hub_card.md").read_text().replace("VERSION", version()))
    shutil.copy(ROOT / "LICENSE", into)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "out" / "hub"
    parser.add_argument("--into", type=pathlib.Path, default=default, help="folder for the files; emptied first")
    into = parser.parse_args().into.resolve()
    write(into)
    for path in sorted(into.glob("build/*/metadata.json")):
        print(f"{path.parent.name}: torch.ops.{json.loads(path.read_text())['id']}")
    print(f"in {into}")


if __name__ == "__main__":
    main()
