"""kernels/ and bench/ install inside fusedattn. Everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# Named on their own, `kernels` and `bench` would collide with other people's packages.
FOLDERS = {"fusedattn": "fusedattn", "fusedattn.kernels": "kernels", "fusedattn.bench": "bench"}
INNER = [f"{name}.{inner}" for name, folder in FOLDERS.items() for inner in find_packages(folder)]

setup(packages=[*FOLDERS, *INNER], package_dir=FOLDERS)
