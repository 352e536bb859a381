#!/usr/bin/env bash
# All that wants a GPU, in one command and under nine minutes: bash bench/gpu.sh [--resume RESULTS] [COMMIT]
#
# Needs a python3 (or PYTHON) with torch, triton, pytest and, to be in time, pytest-xdist; no network, no installation.
# The steps stand at the end of this file, those that answer most first. None needs a later one, and one that hangs, dies
# or fails costs itself alone. Each prints the end of its table. Logs, CSV files and what `fusedattn tune` keeps go into
# one archive, results.tgz in the folder OUT (default: out), renewed before each step: a machine may be gone at any moment.
# --resume takes that archive, or a folder of what was in it, to a second slot on the same GPU with the same versions and
# code: steps that are done and tests that passed are left out, and timings go on in their CSV files.
# COMMIT is what the rows say where there is no git. Exit status 1 if a test or a check failed; what ran out of time did
# not. Without a GPU: a rehearsal, which takes as long as it takes.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
before=""
[ "${1:-}" != --resume ] || { before=$(realpath -e "${2:?usage: gpu.sh --resume RESULTS}") && shift 2 || exit 2; }
mkdir -p "${OUT:=out}"
archive=$(cd "$OUT" && pwd)/results.tgz
OUT=$(mktemp -d)
tree=$(mktemp -d)
if [ -d "$before" ]; then cp -r "$before/." "$OUT"; elif [ -n "$before" ]; then tar -C "$OUT" -xzf "$before"; fi || exit 2
trap 'pack; rm -rf "$tree" "$OUT"' EXIT

pack() { # of a file that grows meanwhile, which is status 1, what there is
    tar -C "$OUT" -czf "$archive.part" .
    [ $? -le 1 ] && mv "$archive.part" "$archive"
}
say() {
    printf '== %4d s  %s\n' "$SECONDS" "$*" | tee -a "$OUT/steps.txt"
    pack
}

say "an importable tree"
commit=${1:-$(git -c safe.directory='*' -C "$here" rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
[ -n "${1:-}" ] || [ -z "$(git -c safe.directory='*' -C "$here" status --porcelain 2>/dev/null)" ] || commit+=+
bash "$here/tree.sh" "$tree" || exit 1
cd "$tree" || exit 1
unset TRITON_INTERPRET
# What a machine was tuned to before is not what is tested and timed here.
export PYTHONPATH=$tree PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$tree/cache

timeout 120 "$python" - >"$tree/about.txt" <<'PYTHON' || exit 1
import hashlib, pathlib, platform, torch, triton, fusedattn, fusedattn.bench, fusedattn.kernels
code = b"".join(file.read_bytes() for file in sorted(pathlib.Path(fusedattn.__path__[0]).rglob("*.py")))
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
print("code", hashlib.sha256(code).hexdigest()[:12])
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
    print("compute capability", "%d.%d" % torch.cuda.get_device_capability())
else:
    print("there is no GPU here: this is a rehearsal")
PYTHON
if [ -n "$before" ] && ! cmp -s "$tree/about.txt" "$OUT/about.txt"; then
    say "begun anew: $before, now in before/, is of another GPU, or of other versions or code"
    mv "$OUT" "$tree/before" && mkdir "$OUT" && mv "$tree/before" "$OUT/before"
fi
cp "$tree/about.txt" "$OUT"
cat "$OUT/about.txt"
timeout 20 nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu \
    --format=csv 2>/dev/null
gpu=$(sed -n 's/^compute capability //p' "$OUT/about.txt")
limit=520 # by which all steps end
# Nearly all of the time of tests goes into compiling tiny kernels, each test its own. With pytest-xdist a test that takes
# too long ends its worker alone, and is one that failed, if pytest is new enough.
parallel=$("$python" -c "import xdist" 2>/dev/null && echo "-n $(nproc) --maxprocesses 16 --dist worksteal")
ends=$("$python" -c "import pytest; print('-o faulthandler_exit_on_timeout=true' * (pytest.version_tuple >= (9, 0)))")

is_done() {
    grep -qsx "$1" "$OUT/done.txt"
}
finish() { # the step is not for another slot
    echo "$name" >>"$OUT/done.txt"
}
wrong() { # WHY: the step failed
    say "$name: $1"
    echo "$name: $1" >>"$OUT/$name.failed"
}
begin() { # NAME SECONDS LEAST: sets name, and left, the seconds that the step may take; 1 if it is not to be done now
    name=$1 left=$2 all+="$1 "
    is_done "$name" && return 1
    [ "$left" -le $((limit - SECONDS)) ] || left=$((limit - SECONDS))
    [ -n "$gpu" ] || left=600
    [ "$left" -ge "$3" ] || return 1
    rm -f "$OUT/$name.failed"
    say "$name (commit $commit)"
}
all=""

outcomes() { # WORD: the names of the tests that a log says passed, or failed; with pytest-xdist, and without
    sed -nE -e "s/^\[gw[0-9]+\] \[ *[0-9]+%\] $1 (.*[^ ]) *$/\1/p" -e "s/^(.*::.*[^ ]) +$1 +\[ *[0-9]+%\]$/\1/p" "$OUT/$name.log"
}
# A test has failed that is STUCK for so many seconds. Beside the tests a part of what timings need compiles.
run_tests() { # [part=PART] NAME SECONDS KILL STUCK ARGUMENT...
    begin "$1" "$2" 15 || return 0
    local kill=$3 stuck=$4 status passed failed over=""
    shift 4
    touch "$OUT/$name.passed"
    [ -z "${part:-}" ] || nice -n 5 timeout -k 5 "$left" "$python" -m fusedattn.bench warm --part "$part" --jobs 10 \
        >"$OUT/warm-$part.log" 2>&1 &
    # INT, so that pytest still says what it had found when its time was over. A kernel that waits for ever heeds KILL alone.
    timeout -s INT -k "$kill" "$left" "$python" -m pytest -v -p no:cacheprovider --tb=short --maxfail=60 $parallel $ends \
        --continue-on-collection-errors -o faulthandler_timeout="$stuck" \
        --but "$OUT/$name.passed" --reasons "$OUT/$name.reasons" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    wait
    passed=$(outcomes PASSED | tee -a "$OUT/$name.passed" | wc -l)
    failed=$({ outcomes FAILED; outcomes ERROR; } | wc -l)
    case $status in
        124 | 137) over="time over, " ;;
        0 | 5) finish ;;
        1) [ "$failed" = 0 ] || finish ;;
    esac
    say "$name: $over$passed passed, $failed failed"
    { grep -E '^(FAILED|ERROR) ' "$OUT/$name.log" || outcomes FAILED; } | head -n 8 | cut -c 1-160
    if [ "$failed" != 0 ]; then
        wrong "$failed of its tests failed"
    elif [ -z "$over" ] && ! is_done "$name"; then
        wrong "pytest ended with status $status"
    elif [ -n "$gpu" ] && [ ! -s "$OUT/$name.passed" ]; then
        wrong "no test passed"
    fi
}

timings() { # NAME QUESTION SECONDS MARGIN ARGUMENT...: the last row begins MARGIN seconds before the end
    begin "$1" "$3" $(($4 + 10)) || return 0
    local question=$2 margin=$4 end=$((SECONDS + left)) status=124
    shift 4
    : >"$OUT/$name.log"
    while left=$((end - SECONDS)) && [ $left -gt $((margin + 5)) ]; do
        timeout -k 5 $left "$python" -m fusedattn.bench "$question" --csv "$OUT/$name.csv" --resume --commit "$commit" \
            --repeat-ms 60 --budget $((left - margin)) "$@" >"$OUT/$name.txt" 2>>"$OUT/$name.log"
        status=$?
        [ $status = 3 ] || break # 3: the GPU refused to go on in that process; a new one goes on after that row
        say "a row broke the GPU's context, once more: $(tail -n 1 "$OUT/$name.log" | cut -c 1-150)"
    done
    # Ratios and goals; the rest is in the archive, and a machine may keep only the end of what is printed.
    [ ! -f "$OUT/$name.txt" ] || sed '0,/^Cases are/d' "$OUT/$name.txt" | tail -n 30 |
        grep -vE '^$|^Counted| sequences of |: not measured$' | tail -n 17 | cut -c 1-150
    if [ $status != 0 ]; then
        say "$name ended with status $status: $(tail -n 1 "$OUT/$name.log" | cut -c 1-150)"
    elif ! grep -q '^the budget of' "$OUT/$name.log"; then
        finish
    fi
}

# INT, so that it ends the processes that it began, and shows what it has.
fusedattn() { # NAME SECONDS LINES ARGUMENT...: fusedattn NAME ARGUMENT..., of which the last LINES are shown
    begin "$1" "$2" 20 || return 0
    local lines=$3 status
    shift 3
    timeout -s INT -k 5 "$left" "$python" -m fusedattn "$name" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    tail -n "$lines" "$OUT/$name.log" | cut -c 1-120
    [ -n "$gpu" ] || [ $status != 2 ] || status=0 # it needs one
    case $status in
        0) finish ;;
        124 | 137) ;;
        *) wrong "it ended with status $status" ;;
    esac
}

small=$([ -n "$gpu" ] || echo tiny-)
few=(--cases "${small}backward" --modes forward,backward --providers fusedattn,sdpa:cudnn,sdpa:flash)
others=(tests --ignore=tests/ptx --ignore=tests/kernels/test_gpu_hopper.py)

part=first run_tests first-contact 25 5 25 ${parallel:+-n2} tests/kernels/test_gpu.py::test_first_contact
timings attention attention 85 8 "${few[@]}"
case $gpu in
    "" | 9.0)
        part=caches run_tests hopper-tests 75 5 30 -m gpu tests/kernels/test_gpu_hopper.py
        ;;
esac
XDG_CACHE_HOME=$OUT/tuned fusedattn tune 200 21
run_tests core-tests 85 5 60 -m "gpu and not matrix and not sample" "${others[@]}"
timings decode decode 20 6
timings varlen varlen 20 6 --without flex
# Here a first slot ends.
XDG_CACHE_HOME=$OUT/tuned timings tuned attention 50 8 "${few[@]}"
part=rest run_tests other-tests 150 5 60 -m "gpu and matrix" "${others[@]}"
timings options options 60 15
timings skipping skipping 30 15 --cases "${small}skipping"
timings small small 25 6
timings backward_flex backward 50 20 --cases "${small}backward" --providers fusedattn,flex
timings minilm minilm 30 10
timings module module 25 8
fusedattn check 60 2 --dtype bfloat16
timings peers attention 150 20

left=""
for name in $all; do is_done "$name" || left+=" $name"; done
[ -z "$left" ] || say "for another slot, with --resume:$left"
if compgen -G "$OUT/*.failed" >/dev/null; then
    say "FAILED: $(cat "$OUT"/*.failed | paste -sd ';')"
    exit 1
fi
say "passed"
