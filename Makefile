# Everything is set up inside .venv; the second call of a target starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

DOCS := .venv-docs
CHECKED := src reproduction tests benchmarks docs/site examples

.PHONY: demo paper test quick test-all test-gpu test-loggers test-deploy lint types format docs setup clean

demo: $(READY)
	$(BIN)/fnrfl compare digits --over "scenario=iid,label-dirichlet(0.1)" --over fnr=off,on -o runs/demo

# Every table of the paper, and its page: of scale tiny what is computed here, of the others what is committed.
paper: $(READY)
	$(BIN)/python -m reproduction all --scale tiny --on processes
	$(BIN)/python -m reproduction all --scale full --show
	$(BIN)/python -m reproduction all --scale quick --show

test: lint types quick

# Two workers with one thread each: torch's own threads would only get in each other's way. Tests of one group are run
# by one worker and share what they compute. Fewer arenas of malloc keep less memory that is free.
PYTEST := OMP_NUM_THREADS=1 MALLOC_ARENA_MAX=2 $(BIN)/python -m pytest -n 2 --dist loadgroup -q

quick: $(READY)
	$(PYTEST) -m "not slow" --hypothesis-profile repeatable

# Ray and Flower into .venv, about 300 MB: tests that need them are skipped where they are missing.
test-all: lint types
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[flower,ray]'
	$(PYTEST)
	$(BIN)/python tests/mutants.py

# For a machine with a GPU: all tests that need one, then a benchmark of about two minutes.
test-gpu: $(READY)
	$(BIN)/python -m pytest -q tests/test_gpu.py tests/test_padding.py tests/test_client_convolutions.py tests/test_compiled.py \
		tests/test_joint_probes.py tests/test_own_models.py
	$(BIN)/python benchmarks/gpu.py headline forward

# TensorBoard, MLflow and W&B into .venv, about 270 MB, and the loggers against them. Not part of test-all for that reason.
test-loggers: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tensorboard,mlflow,wandb]'
	$(PYTEST) tests/test_loggers.py

# Flower into .venv, and a federation on loopback with TLS and node keys: parity, faults, refusals. Ten minutes or so.
test-deploy: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[flower]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/deployment_checks.py

lint: $(READY)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

# The documents as a site, build/site/index.html. Its packages have an environment of their own, without torch: the
# pages about Python are made from the source.
docs: $(DOCS)/.ready
	$(DOCS)/bin/python docs/site/build.py

EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c '$(EXTRA)' | xargs $(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
	@touch $@

setup: $(READY)

# torch comes first and alone: whatever asks for it afterwards is content with the pinned build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fnrfl needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
