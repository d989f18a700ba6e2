# `make demo` and `make test` set everything up by themselves; the second time they only run.
# `make test PYTHON=python3.12` and `make test TORCH=2.11.0` test with another Python or torch, in a .venv of its own.
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# Tests start many processes: without bytecode on the disk each compiles its modules anew, pytest even its plugins.
unexport PYTHONDONTWRITEBYTECODE
# pip is not quiet: on a slow disk or line its lines are the only sign of life for minutes.
PIP := $(BIN)/pip install --disable-pip-version-check --constraint $(VENV)/constraints.txt

.PHONY: demo strips wheels test nightly faults fuzz foreign lint types format figures notebooks docs clean

demo: $(VENV)/.installed
	$(BIN)/lowrank demo

# Compiled 1x3 and 3x1 convs (native/): they need a C++ compiler, and everything works without them.
strips: $(VENV)/.strips

# Wheels of the package, of its compiled part and of the writer of .tflite files, in dist/.
wheels: $(VENV)/.installed
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./native ./tflite

# Engines have processes of their own: what one of these compiled libraries breaks would show in a test of ours.
# Each worker takes a stretch of the tests, so that fixtures and large imports of a module are made once, not per worker.
WORKERS := --numprocesses auto --dist worksteal
test: $(VENV)/.dev $(VENV)/.strips
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m "not nightly" --ignore=tests/deploy/engines
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m "not nightly" tests/deploy/engines

# What takes minutes: kernels compiled for GPUs that are not here, ILSVRC in miniature by two processes, the zoo.
nightly: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m nightly --durations=0

# Kill, freeze and damage training runs, and resume each: docs/reliability.md has the figures.
FAULTS ?= 520
faults: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fault_harness.py --faults $(FAULTS)

# Hostile input for every reader, and new random examples for the property tests, several times over. What fails is
# printed so that it can be run again.
INPUTS ?= 10800
ROUNDS ?= 20
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz_harness.py --inputs $(INPUTS)
	for round in $$(seq $(ROUNDS)); do \
		OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m hypothesis --hypothesis-profile fuzz || exit 1; done

# Every transform on the networks of other libraries, with a table of what came of it; docs/foreign.md shows the last.
foreign: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.foreign --out benchmarks/results/foreign.json

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv* build dist site .pytest_cache .ruff_cache .hypothesis

# torch goes first and by its pin: an open range would take the newest build with all of CUDA.
$(VENV)/.installed: pyproject.toml tflite/pyproject.toml constraints.txt
	@echo "Setting up $(VENV), this once: pip fetches torch and about 60 packages, often in 2 minutes, at worst in 15."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(PIP) torch
	$(PIP) --editable ".[data,train,plots,onnx]"  # not zoo: torchvision needs its own build of torch
	$(PIP) --no-deps --editable ./tflite  # what it needs comes with the extra engines
	@touch $@

$(VENV)/.strips: $(VENV)/.installed $(wildcard native/*.* native/*/*)
	$(PIP) --no-deps --force-reinstall ./native || echo "No C++ compiler: compiled strips are left out."
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	@touch $@

FIGURES := vgg googlenet places timings connections receptive-field

# The pictures that README and docs show, from the published figures, the committed records and the shipped weights.
figures: $(VENV)/.installed
	@mkdir -p docs/images
	for name in $(FIGURES); do $(BIN)/lowrank figure $$name -o docs/images/$$name.svg; done
	$(BIN)/lowrank figure nin --runs benchmarks/results/cifar10 -o docs/images/nin.svg
	$(BIN)/lowrank figure curves --runs benchmarks/results/cifar10/init -o docs/images/init-cifar10.svg
	$(BIN)/lowrank figure filters --model nin-c3-lr --pretrained cifar10 -o docs/images/filters-cifar10.svg
	$(BIN)/lowrank figure spectra --model nin --pretrained cifar10 -o docs/images/spectra-cifar10.svg
	$(BIN)/lowrank figure receptive-field --model nin-c3-lr --pretrained cifar10 \
		-o docs/images/receptive-field-cifar10.svg
	cd docs && PYTHONPATH=.. ../$(BIN)/python -m tables.headline  # docs/images/headline.svg
	cd docs && PYTHONPATH=.. ../$(BIN)/python -m tables.frontier  # docs/images/digits-compared.svg
	cd docs && PYTHONPATH=.. ../$(BIN)/python -m tables.depthwise  # docs/images/depthwise.svg, once it was measured
	cd docs && PYTHONPATH=.. ../$(BIN)/python -m tables.learned  # docs/images/learned-shapes.svg, docs/images/learned-times.svg
	$(BIN)/python docs/blocks.py

# The notebooks from their pages, run from top to bottom: their outputs are stored.
notebooks: $(VENV)/.dev
	$(BIN)/python docs/notebooks.py
	cd notebooks && ../$(BIN)/jupyter execute --inplace *.ipynb

# The documentation in site/, which is opened as a file and asks the network for nothing.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html."
