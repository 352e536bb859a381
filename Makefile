# The first target makes .venv with PYTHON (make test PYTHON=python3.12). It is made again if PYTHON or the files behind it change.
# ARGS is passed on to the command of a target: make demo ARGS="--text FILE".

READY := .venv/made-with
PYTHON ?= $(or $(shell cat $(READY) 2>/dev/null),python3)
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal
OURS := fusedattn kernels bench examples docs tests .ci
OTHERS := 3.6.0 3.9.0# the oldest and the newest Triton that we support
COMPILED := $(addprefix tests/,ptx launch dispatch/test_launch_path.py cli/test_warmup.py offline/test_compile.py)
INTERNALS := $(addprefix tests/,dispatch/test_launch_path.py launch/test_failures.py cli/test_warmup.py)
# Calls that `make versions` executes by the compiled kernels of a version.
CALLS_3.6.0 := slopes sinks decode:_new_keys_in_pages hopper_packed_causal_D128
CALLS_3.9.0 := hopper_window hopper_packed_causal_D128
CALLS_OF = $(CALLS_$(1):%='tests/ptx/test_calls.py::test_a_call_by_its_compiled_kernels[%-sm_90]')

unexport PYTHONDONTWRITEBYTECODE # pip compiles no modules here, so the first import does

.PHONY: help demo test test-all interpreter compile ptx on-gpu benchmarks versions older-cpu check docs gpu bench clean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## train a small model on a text, check it against float64, plot its attention
	$(PY) examples/demo.py $(ARGS)

test: FEW := and not matrix and not planted
test: MATRIX := and not matrix and not planted
test: interpreter compile ptx on-gpu ## run a sample of all tests, in minutes: the four tiers below

test-all: FEW := and not planted
test-all: MATRIX := and not sample and not planted
test: ROWS := --few
test-all: ROWS := --some
test-all: interpreter compile ptx on-gpu benchmarks ## run all tests: the four tiers below, and benchmarks

interpreter: $(READY) ## tier 1: kernels in Triton's interpreter, and other tests that need no GPU
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu $(MATRIX)" --ignore=tests/bench --ignore=tests/cli --ignore=tests/ptx $(ARGS)

compile: $(READY) $(TRITON:%=.triton-%) ## tier 2: compile every kernel, without a GPU (TRITON=3.6.0: with that version; ARGS=--report: write bench/results/kernels.md)
	@if $(PY) -c "import triton"; then $(TRITON:%=PYTHONPATH=.triton-%) $(PY) -m tests.offline.compile $(ROWS) $(ARGS); \
	else echo "make: Triton is not installed, nothing to compile"; fi

ptx: $(READY) $(TRITON:%=.triton-%) ## tier 3: execute compiled kernels on the CPU (ARGS=--everything: each tile, and more GPUs)
	@if $(PY) -c "import triton"; then $(TRITON:%=PYTHONPATH=.triton-%) $(PYTEST) $(COMPILED) -m "not gpu $(FEW)" $(ARGS); \
	else echo "make: Triton is not installed, nothing to execute"; fi

on-gpu: $(READY) ## tier 4: run the kernels on a GPU, if there is one
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then $(PYTEST) -m "gpu $(MATRIX)" $(ARGS); \
	else echo "make: no GPU, its tests are skipped"; fi

benchmarks: $(READY) ## test the benchmarks and the commands
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" tests/bench tests/cli $(ARGS)

versions: $(READY) $(OTHERS:%=.triton-%) ## test Triton internals and a few calls, with the oldest and the newest Triton
	$(foreach v,$(OTHERS),PYTHONPATH=.triton-$(v) $(PYTEST) $(INTERNALS) $(call CALLS_OF,$(v)) -k "not little_time" &&) true
	PYTHONPATH=.triton-$(lastword $(OTHERS)) .venv/bin/fusedattn check --device cpu --dtype bfloat16

older-cpu: $(READY) ## test the CPU backend and Hugging Face models, without AVX-512
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TRITON_INTERPRET=1 \
		$(PYTEST) -m "not gpu and not matrix and not planted" tests/cpu/test_named_cases.py::test_an_option_alone tests/compat/test_models.py $(ARGS)

check: .venv/checkers ## run ruff, mypy and zizmor (workflows), and check first words of docstrings, README's sentences and imports
	@! grep -rnE --include='*.py' '^ *"""(What|Whether|Where|Which|How|Why|Those|That|Of)\b' $(OURS)
	@! tr '\n' ' ' <README.md | grep -oP '[,;:](?: [^\s,;:.!?|]+){41}' # no clause after a comma, semicolon or colon has over 40 words
	@# The package of `make hub` has another name, so imports within ours are relative.
	@! grep -rnE --include='*.py' '^ *(from|import) fusedattn\b' fusedattn kernels
	@! grep -rnE --include='*.py' '(^|[^.\w])(compile|__import__)\(|trust_remote_code|allow_pickle' fusedattn kernels bench
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	.venv/bin/zizmor --offline --persona=auditor -q .github/workflows

docs: .venv/docs ## build the documentation into out/site; broken links are errors
	@# Not with -q: that hides warnings from --strict as well.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -f docs/mkdocs.yml $(ARGS)
	@echo "make: open out/site/index.html"

.PHONY: dist
dist: $(READY) ## build source archive and wheel into dist/, twice, and compare their bytes
	$(PY) .ci/dist.py $(ARGS)

.PHONY: hub
hub: $(READY) ## write a repository for Hugging Face's kernels into out/hub
	$(PY) .ci/hub.py $(ARGS)

gpu: ## run the tests and benchmarks that need a GPU, without network (OUT: folder for results)
	bash bench/gpu.sh $(ARGS)

bench: $(READY) ## time attention beside other packages on this machine (ARGS=--help: options)
	$(PY) -m fusedattn bench $(ARGS)

clean: ## remove .venv and all other generated files
	rm -rf .venv .triton-* .kernels build dist out demo.png bench.png *.egg-info .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# .venv is made again if PYTHON changes.
ifneq ($(PYTHON),$(shell cat $(READY) 2>/dev/null))
.PHONY: $(READY)
endif
$(READY): .ci/setup_venv.py pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.10 or newer" >&2; exit 1; }
	@$(PYTHON) .ci/setup_venv.py $(PYTHON)

.venv/checkers: $(READY)
	$(PY) -m pip install -q --no-compile -c constraints.txt ruff mypy zizmor
	@touch $@

.venv/docs: $(READY)
	$(PY) -m pip install -q --no-compile -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	@touch $@

.triton-%: | $(READY)
	$(PY) -m pip install -q --no-compile --no-deps --target $@ triton==$*

.kernels: | $(READY) # Hugging Face's package, outside of our folder of that name, without what it needs for uploads only
	$(PY) -m pip install -q --no-compile --no-deps --target $@ -c constraints.txt kernels tomlkit
