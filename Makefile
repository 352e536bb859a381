# `make demo` and `make test` need nothing done before: the first use makes .venv with PYTHON (make test PYTHON=python3.12),
# and a change of what it is made from makes it again. ARGS goes to the command: make demo ARGS="--text FILE".

READY := .venv/made-with
PYTHON ?= $(or $(shell cat $(READY) 2>/dev/null),python3)
PY := .venv/bin/python
PYTEST := $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal
OTHERS := 3.6.0 3.9.0# the oldest and the newest version of Triton that we promise
KNOWING := $(addprefix tests/,dispatch/test_launch_path.py launch/test_failures.py cli/test_warmup.py)

unexport PYTHONDONTWRITEBYTECODE # pip compiles no modules here, so who imports one first does

.PHONY: help demo test test-all interpreter compile ptx on-gpu benchmarks versions older-cpu check docs gpu bench clean
.NOTPARALLEL:

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## train a small model on real text, check it against the reference, draw what it attends to
	$(PY) examples/demo.py $(ARGS)

test: FEW := and not matrix and not planted
test: MATRIX := and not matrix and not planted
test: interpreter compile ptx on-gpu ## whether it works here, in minutes: the four tiers below, with a few cases that cover all pairs of options

test-all: FEW := and not planted
test-all: MATRIX := and not sample and not planted
test: ROWS := --few
test-all: ROWS := --some
test-all: interpreter compile ptx on-gpu benchmarks ## the whole matrix: the four tiers below, and the tests of the benchmarks

interpreter: $(READY) ## tier 1: the real kernels on CPU tensors, and everything else that needs no GPU
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu $(MATRIX)" --ignore=tests/bench --ignore=tests/cli --ignore=tests/ptx $(ARGS)

compile: $(READY) $(TRITON:%=.triton-%) ## tier 2: compile every kernel for GPUs that are not here (TRITON=3.6.0: with that version; ARGS=--report: into bench/results/kernels.md)
	@if $(PY) -c "import triton"; then $(TRITON:%=PYTHONPATH=.triton-%) $(PY) -m tests.offline.compile $(ROWS) $(ARGS); \
	else echo "make: there is no Triton here, so nothing to compile"; fi

ptx: $(READY) $(TRITON:%=.triton-%) ## tier 3: execute what Triton compiled, call by call, on a GPU that is not there (ARGS=--everything: each tile and GPU)
	@if $(PY) -c "import triton"; then $(TRITON:%=PYTHONPATH=.triton-%) $(PYTEST) tests/ptx -m "not gpu $(FEW)" $(ARGS); \
	else echo "make: there is no Triton here, so nothing to execute"; fi

on-gpu: $(READY) ## tier 4: the same kernels on the GPU, if there is one
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then $(PYTEST) -m "gpu $(MATRIX)" $(ARGS); \
	else echo "make: there is no GPU here, so its tests are left out"; fi

benchmarks: $(READY) ## the tests of bench/ and of the commands
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" tests/bench tests/cli $(ARGS)

versions: $(READY) $(OTHERS:%=.triton-%) ## what knows Triton from inside, warmup and check, by the other versions of Triton
	for version in $(OTHERS); do PYTHONPATH=.triton-$$version $(PYTEST) $(KNOWING) || exit 1; done
	PYTHONPATH=.triton-3.9.0 .venv/bin/fusedattn check --device cpu --dtype bfloat16

older-cpu: $(READY) ## the CPU backend and Hugging Face's models, as a CPU without AVX-512 computes them
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 TRITON_INTERPRET=1 \
		$(PYTEST) -m "not gpu and not matrix and not planted" tests/cpu/test_named_cases.py::test_an_option_alone tests/compat/test_models.py $(ARGS)

check: .venv/checkers ## ruff and mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

docs: .venv/docs ## the site of the documentation, into out/site: a broken link or name is an error
	@# Not with -q: that hides warnings from --strict as well.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -f docs/mkdocs.yml $(ARGS)
	@echo "make: open out/site/index.html"

.PHONY: dist
dist: $(READY) ## the source archive and the wheel, built twice into the same bytes, into dist/
	$(PY) .ci/dist.py $(ARGS)

.PHONY: hub
hub: $(READY) ## the package as a repository of Hugging Face's kernels, into out/hub
	$(PY) .ci/hub.py $(ARGS)

gpu: ## everything that needs a GPU, from a bare clone and without a network (OUT: where the results go)
	bash bench/gpu.sh $(ARGS)

bench: $(READY) ## time attention against its peers on this machine (ARGS=--help)
	$(PY) -m fusedattn bench $(ARGS)

clean: ## remove .venv and everything else that was made here
	rm -rf .venv .triton-* .kernels build dist out demo.png bench.png *.egg-info .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Made anew when the Python is another one.
ifneq ($(PYTHON),$(shell cat $(READY) 2>/dev/null))
.PHONY: $(READY)
endif
$(READY): .ci/setup_venv.py pyproject.toml setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON); install Python 3.10 or newer" >&2; exit 1; }
	@$(PYTHON) .ci/setup_venv.py $(PYTHON)

.venv/checkers: $(READY)
	$(PY) -m pip install -q --no-compile -c constraints.txt ruff mypy
	@touch $@

.venv/docs: $(READY)
	$(PY) -m pip install -q --no-compile -c constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	@touch $@

.triton-%: | $(READY)
	$(PY) -m pip install -q --no-compile --no-deps --target $@ triton==$*

.kernels: | $(READY) # Hugging Face's, where `import kernels` finds no folder of ours; without what it signs uploads with
	$(PY) -m pip install -q --no-compile --no-deps --target $@ -c constraints.txt kernels tomlkit
