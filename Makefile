# `make demo` and `make test` are complete on their own: a machine needs Python
# (3.11 or newer) and make. Everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint bench docs clean

help:
	@echo "make demo    the main job on an embedded S3 server, with a table of what happened"
	@echo "make test    the whole test suite"
	@echo "make lint    ruff, mypy, layers"
	@echo "make bench   what a hit costs, and how fast a shard is fetched, against peers"
	@echo "make docs    write the generated parts of README.md anew"
	@echo "make clean   remove .venv and caches of tools"

# One stamp per extra: the demo does not wait for torch.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.bench: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

demo: $(VENV)/.demo
	@$(BIN)/shardcache demo

test: $(VENV)/.test
	$(BIN)/python -m coverage erase
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.hits
	$(BIN)/python -m benchmarks.fetch

docs: $(VENV)/.test
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
