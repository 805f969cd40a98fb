# `make demo` and `make test` do everything on a machine with Python 3.11, gcc and a package index.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROMPT ?=
export PROMPT

.PHONY: demo test test-slow test-matrix test-failures lint format clean

demo: $(STAMP)
	@if [ -n "$$PROMPT" ]; then $(BIN)/outrider demo --prompt "$$PROMPT"; else $(BIN)/outrider demo; fi

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow and not matrix and not failures"

test-slow: $(STAMP)
	$(BIN)/pytest -m slow --timeout 3600

test-matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m matrix tests/matrix

test-failures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m failures tests/engine

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): requirements-dev.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
