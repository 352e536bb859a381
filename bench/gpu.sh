#!/usr/bin/env bash
# All that wants a GPU, in one command and under nine minutes: bash bench/gpu.sh [COMMIT]
#
# Needs a python3 (or PYTHON) with torch, triton, pytest and, to be in time, pytest-xdist; no network, no installation.
# The GPU tier of the tests (meanwhile the benchmark's kernels compile), that of the kernel for Hopper, `fusedattn check`,
# then the pipelines of that kernel which passed, the forms of the backward, forward and backward against every peer that
# is installed, with each option, what skipping blocks saves, packed sequences, caches, tiny calls, a model of Hugging
# Face's, modules, and the demo's model. Each step prints its table as it ends. Logs and CSV files go into one archive,
# results.tgz in the folder OUT (default: out), which is renewed before each step: a machine may be gone at any moment.
# COMMIT is what the rows say where there is no git. Exit status 1 if a test or a check failed. Without a GPU: a rehearsal.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
mkdir -p "${OUT:=out}"
archive=$(cd "$OUT" && pwd)/results.tgz
OUT=$(mktemp -d)
tree=$(mktemp -d)
trap 'pack; rm -rf "$tree" "$OUT"' EXIT
failed=""

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
export PYTHONPATH=$tree PYTHONUNBUFFERED=1

timeout 120 "$python" - <<'PYTHON' || exit 1
import platform, torch, triton, fusedattn, fusedattn.bench, fusedattn.kernels
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
else:
    print("there is no GPU here: this is a rehearsal")
PYTHON
hopper=$("$python" -c 'import torch; print("yes" * (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)))')
nvidia-smi --query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu --format=csv 2>/dev/null

say "tests (commit $commit); meanwhile what comes after them compiles"
nice -n 5 timeout -k 5 150 "$python" -m fusedattn.bench warm --jobs 8 >"$OUT/warm.log" 2>&1 &
warm=$!
for dtype in bfloat16 float16 float32; do
    nice -n 5 timeout -k 5 150 "$python" -m fusedattn check --json --device cuda --dtype $dtype >/dev/null 2>&1 &
done
parallel=""
# Nearly all of the time goes into compiling tiny kernels, each test its own.
"$python" -c "import xdist" 2>/dev/null && parallel="-n $(nproc) --maxprocesses 16 --dist worksteal"
run_tests() { # NAME SECONDS KILL ARGUMENT...: sets status
    local name=$1 seconds=$2 kill=$3
    shift 3
    # INT, so that pytest still says what it had found when its time was over.
    timeout -s INT -k "$kill" "$seconds" "$python" -m pytest -m gpu $parallel -q -p no:cacheprovider --tb=short \
        --maxfail=60 "$@" >"$OUT/$name.log" 2>&1
    status=$?
    tail -n 15 "$OUT/$name.log" | cut -c 1-200
}
run_tests tests 145 10 tests --ignore=tests/kernels/test_hopper.py --ignore=tests/kernels/test_gpu_hopper.py
[ $status = 0 ] || failed+="the tests ended with status $status (124: their time was over); "
grep -q '[0-9] passed' "$OUT/tests.log" || failed+="no test passed; "

# A kernel that waits for ever heeds no signal but KILL, so these are a process of their own. With pytest-xdist a test
# that takes too long ends its worker alone, and is one that failed.
say "tests of the kernel for Hopper"
run_tests hopper-tests 75 5 tests/kernels/test_gpu_hopper.py --junitxml="$OUT/hopper-tests.xml" \
    -o faulthandler_timeout=30 -o faulthandler_exit_on_timeout=true
if [ -n "$hopper" ]; then
    [ $status = 0 ] || failed+="the tests of the kernel for Hopper ended with status $status (124, 137: their time was over); "
    grep -q '[0-9] passed' "$OUT/hopper-tests.log" || failed+="no test of the kernel for Hopper passed; "
fi
wait $warm
say "compiled ahead, status $? (124: what is left compiles later): $(grep -c ' s  ' "$OUT/warm.log") cases"
wait

say "check"
timeout -k 5 30 "$python" -m fusedattn check --json >"$OUT/check.json" 2>"$OUT/check.log"
status=$?
if [ $status != 0 ] && grep -Eq "No module named '?(rich|fusedattn.__main__|fusedattn.cli)" "$OUT/check.log"; then
    say "left out: $(tail -n 1 "$OUT/check.log")"
elif [ $status != 0 ]; then
    failed+="fusedattn check ended with status $status; "
    tail -n 5 "$OUT/check.log" | cut -c 1-200
fi

# Each has a time by which it ends, so that the next begins; what one leaves of its time is the next one's.
timings() { # NAME END MARGIN ARGUMENT...: the last unit begins MARGIN seconds before END
    local name=$1 end=$2 margin=$3 resume="" status=124 left
    shift 3
    say "timings: $name"
    while left=$((end - SECONDS)) && [ $left -gt $((margin + 5)) ]; do
        timeout -k 5 $left "$python" -m fusedattn.bench "$name" "$@" --csv "$OUT/$name.csv" --commit "$commit" \
            --budget $((left - margin)) --repeat-ms 60 $resume >"$OUT/$name.txt" 2>>"$OUT/$name.log"
        status=$?
        resume=--resume
        [ $status = 3 ] || break # 3: the GPU refused to go on in that process; a new one goes on after that row
        say "a row broke the GPU's context, once more: $(tail -n 1 "$OUT/$name.log" | cut -c 1-200)"
    done
    [ $status = 0 ] || say "$name ended with status $status: $(tail -n 1 "$OUT/$name.log" | cut -c 1-200)"
    tell "$name"
}

tell() { # NAME: ratios and goals; the rows before them are in the archive
    [ ! -f "$OUT/$1.txt" ] || sed -n '/^Cases are/,$p' "$OUT/$1.txt" | cut -c 1-200
}

once() { # NAME SECONDS: one that is short, and has no budget
    local name=$1 seconds=$2
    say "timings: $name"
    timeout -k 5 "$seconds" "$python" -m fusedattn.bench "$name" --csv "$OUT/$name.csv" --commit "$commit" --repeat-ms 60 \
        >"$OUT/$name.txt" 2>"$OUT/$name.log" || say "$name ended with status $?: $(tail -n 1 "$OUT/$name.log" | cut -c 1-200)"
    tell "$name"
}

small=$("$python" -c 'import torch; print("" if torch.cuda.is_available() else "tiny-")')
# What failed or waited for ever in this very run is not timed.
timings hopper 315 12 ${hopper:+--tests "$OUT/hopper-tests.xml"}
timings backward_forms 368 12
timings attention 412 18
timings options 430 10
timings skipping 444 8 --cases "${small}skipping"
timings varlen 456 6
timings decode 471 6
timings small 482 5
once minilm 19
once module 15
once end_to_end 14

say "tests"
for name in tests hopper-tests; do
    grep -E '(passed|failed|error|skipped|no tests ran).* in ' "$OUT/$name.log" | tail -n 1
done
if [ -n "$failed" ]; then
    say "FAILED: $failed"
    exit 1
fi
say "passed"
