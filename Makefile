# Two commands do everything on a fresh clone: `make demo` and `make test`.
# Each target sets up its environment once, when the stamp file is missing or
# pyproject.toml is newer than it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
BENCH ?=

.PHONY: help demo test test-py312 check docs format bench bench-peers soak clean
.DEFAULT_GOAL := help

help:           ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) found; Meshwright needs Python 3.11 or newer; use make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## the whole story in under two minutes
	@$(BIN)/meshwright demo

test: $(STAMP)  ## the whole test suite
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# The newest JAX needs Python 3.12; the default environment may be older.
PYTHON312 ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || \
  { P="$$(pyenv prefix "$$(pyenv latest 3.12 2>/dev/null)" 2>/dev/null)" && echo "$$P/bin/python3.12"; })

test-py312:     ## the test suite on Python 3.12 with its newer JAX
	@test -n '$(PYTHON312)' || { echo "error: no python3.12 here; use make test-py312 PYTHON312=/path/to/python3.12"; exit 1; }
	@$(MAKE) --no-print-directory test VENV=.venv-py312 PYTHON='$(PYTHON312)'

check: $(STAMP) ## lint, format, types and the pages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory docs

# Every page and docstring, every link and name between them; a warning is an error. All
# pages are read anew, for those that are not would hide their warnings.
docs: $(STAMP)  ## the pages as HTML, in build/html
	@$(BIN)/python -m sphinx -c docs -b html --nitpicky --fail-on-warning --keep-going \
	  --fresh-env --quiet . build/html
	@echo "the pages: build/html/docs/index.html"

format: $(STAMP) ## rewrite the sources as the formatter wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## measurements of all suites, or of BENCH="fit mesh"
	@$(BIN)/python benchmarks/run.py $(BENCH)

bench-peers: $(STAMP) ## the same job on TensorFlow and PyTorch, side by side
	@$(BIN)/python benchmarks/peers.py

soak: $(STAMP)  ## the long tests
	@$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

clean:          ## remove environments, caches and the built pages
	rm -rf build .venv .venv-py312 .venv-tf .venv-torch .cache .mypy_cache .ruff_cache .pytest_cache
