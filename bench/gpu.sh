#!/usr/bin/env bash
# Runs everything that needs a GPU: bash bench/gpu.sh [COMMIT [STEP ...]]
#
# It needs a python3 (or PYTHON) with torch, triton and pytest, better with pytest-xdist; no network, no installation.
# Steps have time limits and are independent. Their limits add up to 42 minutes; in slots of ten minutes:
#     info first forward backward packed | kernels hopper | others matrix | tune options module | decode flex check
# Logs, CSV files and the file of `fusedattn tune` go into results.tgz in the folder OUT (default: out), and are added to
# those of earlier runs. COMMIT is written into the rows if there is no git. The exit status is 1 if a step failed or did
# not finish. Without a GPU it is a rehearsal.
set -uo pipefail
cd "$(dirname "$0")/.."
commit=${1:-$(git -c safe.directory='*' rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
[ -n "${1:-}" ] || [ -z "$(git -c safe.directory='*' status --porcelain 2>/dev/null)" ] || commit+=+
steps=" ${*:2} "
python=${PYTHON:-python3}
mkdir -p "${OUT:=out}"
archive=$(cd "$OUT" && pwd)/results.tgz
results=$(mktemp -d)
tree=$(mktemp -d)
failed=""
ran=" "
[ ! -f "$archive" ] || tar -C "$results" -xzf "$archive"
trap 'pack; rm -rf "$tree" "$results"' EXIT

pack() { # tar has status 1 if a file grows meanwhile
    tar -C "$results" -czf "$archive.part" .
    [ $? -le 1 ] && mv "$archive.part" "$archive"
}
say() {
    printf '== %4d s  %s\n' "$SECONDS" "$*" | tee -a "$results/steps.txt"
}
step() { # NAME SECONDS LINES COMMAND...: run it, show the last LINES of its log. INT lets it print what it has.
    local name=$1 seconds=$2 lines=$3 status
    [[ $steps = "  " || $steps = *" $name "* ]] || return
    shift 3
    ran+="$name "
    say "$name"
    timeout -s INT -k 15 "$seconds" "$@" >"$results/$name.log" 2>&1
    status=$?
    tail -n "$lines" "$results/$name.log" | cut -c 1-150
    case $status in
        0) ;;
        124 | 137) say "$name: time over" && failed+=" $name" ;;
        2) [[ $name = tune && -z $gpu ]] || { say "$name: failed with status 2" && failed+=" $name"; } ;;
        *) say "$name: failed with status $status" && failed+=" $name" ;;
    esac
    pack
}
question() { # SECONDS QUESTION [ARGUMENT...]
    step "$2" "$1" 15 "$python" -m fusedattn bench "${@:2}" --csv "$results/$2.csv" --commit "$commit"
}

tests() { # NAME SECONDS MARKERS ARGUMENT...
    step "$1" "$2" 30 "$python" -m pytest -q -m "$3" --tb=short --maxfail=60 -p no:cacheprovider $workers $ends \
        -o faulthandler_timeout=60 "${@:4}"
}

# An importable copy, with kernels/ and bench/ inside the package. Tests read them beside it, too.
cp -r fusedattn kernels bench docs tests pyproject.toml setup.py README.md LICENSE "$tree"
cp -r kernels bench "$tree/fusedattn"
find "$tree" -name __pycache__ -prune -exec rm -rf {} +
cd "$tree" || exit 1
unset TRITON_INTERPRET
export PYTHONPATH=$tree PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$tree/cache # ignore earlier tuning files

workers=$("$python" -c "import xdist" 2>/dev/null && echo "-n $(nproc) --maxprocesses 16 --dist worksteal")
ends=$("$python" -c "import pytest; print('-o faulthandler_exit_on_timeout=true' * (pytest.version_tuple >= (9, 0)))")
gpu=$("$python" -c "import torch; print('yes' * torch.cuda.is_available())")
peers=fusedattn,sdpa:cudnn,sdpa:flash,sdpa:efficient,flash-attn,naive

step info 60 40 "$python" -m fusedattn info
step first 60 5 "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_gpu.py::test_first_contact
question 150 forward --providers "$peers"
question 200 backward --providers "$peers"
question 90 packed
question 60 decode
tests kernels 280 "gpu and not matrix and not sample" tests/kernels --ignore=tests/kernels/test_gpu_hopper.py
tests hopper 200 gpu tests/kernels/test_gpu_hopper.py
tests others 280 "gpu and not matrix and not sample" tests --ignore=tests/ptx --ignore=tests/kernels
tests matrix 280 "gpu and matrix" tests --ignore=tests/ptx --ignore=tests/kernels/test_gpu_hopper.py
XDG_CACHE_HOME=$results step tune 250 30 "$python" -m fusedattn tune
question 200 options
question 60 module
step flex 240 15 "$python" -m fusedattn bench forward backward --providers fusedattn,flex \
    --csv "$results/flex.csv" --commit "$commit"
step check 90 5 "$python" -m fusedattn check --dtype bfloat16

for name in $steps; do [[ $ran = *" $name "* ]] || failed+=" $name (there is no such step)"; done
[ -z "$failed" ] || { say "failed:$failed" && exit 1; }
say "passed"
