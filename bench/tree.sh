#!/usr/bin/env bash
# Makes an importable copy of the package and its tests in a folder, without pip and without setuptools: bash bench/tree.sh FOLDER
set -euo pipefail
folder=${1:?usage: bash bench/tree.sh FOLDER}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."
# kernels/ and bench/ lie inside the package, as setup.py installs them, and once more beside it for tests that read them.
cp -r fusedattn kernels bench tests pyproject.toml setup.py README.md LICENSE "$folder"
cp -r kernels bench "$folder/fusedattn"
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
