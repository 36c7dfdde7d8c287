# `make demo` and `make test` are complete on their own: a machine needs Python
# (3.11 to 3.13; 3.14 is not tested yet) and make. Everything else goes into .venv, and with another Python, such as
# `make test PYTHON=python3.13`, into .venv-3.13.

PYTHON ?= python3
# Processes that test at the same time, each with files of tests of its own.
WORKERS ?= 2
# Options of `make bench`, such as BENCH=--quick.
BENCH ?=
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(or $(VERSION),$(error $(PYTHON) does not run)))
BIN := $(VENV)/bin

PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# A stamp whose recipe failed half-way is no stamp.
.DELETE_ON_ERROR:
.PHONY: help demo test smoke coverage stress stress-full test-integrations lint audit bench docs site clean

help:
	@echo "make demo    the main job on an embedded S3 server, with a table of what happened"
	@echo "make test    the whole test suite (five minutes on two cores)"
	@echo "make smoke   a minute of it, for another Python: make smoke PYTHON=python3.13"
	@echo "make coverage  the same, and which lines it runs"
	@echo "make stress  storms, crashes, broken locks and filesystems, naive variants (15 minutes)"
	@echo "make stress-full  the same for hours: every system call, long storms, fuzzing"
	@echo "make test-integrations  pandas, Arrow, Ray, Hugging Face, Lightning, open_clip (installs them)"
	@echo "make lint    ruff (with its security rules), mypy, pyright, layers, dependencies"
	@echo "make audit   known vulnerabilities of the dependencies (needs the network)"
	@echo "make bench   every benchmark, against peers; writes docs/benchmarks.md (two hours)"
	@echo "make docs    write docs/options.md and docs/cli.md anew"
	@echo "make site    build the documentation's site in .site"
	@echo "make clean   remove all environments and caches of tools"

# One stamp per extra: the demo does not wait for torch. Two runs of make in one checkout take
# turns here, and the second finds the work done: installing under a running test would break it.
INSTALL = @flock .venv.lock sh -euc '\
	if test -e $@ && ! test pyproject.toml -nt $@; then exit; fi; \
	$(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet $(3) --editable ".[$(1)]"; \
	touch $@ $(2)'

# What the demo does not import need not be compiled: a third of the time.
$(VENV)/.demo: pyproject.toml
	$(call INSTALL,demo,,--no-compile)

$(VENV)/.smoke: pyproject.toml
	$(call INSTALL,smoke,$(VENV)/.demo)

$(VENV)/.test: pyproject.toml
	$(call INSTALL,test,$(VENV)/.demo $(VENV)/.smoke)

# Apart from `.test`: what it installs weighs a gigabyte.
$(VENV)/.test-integrations: pyproject.toml
	$(call INSTALL,test-integrations,$(VENV)/.demo $(VENV)/.smoke $(VENV)/.test)

$(VENV)/.docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

# boto3 in a second step, in the version of the botocore that s3fs pins (both have the same
# numbers): if pip gets both at once, it finds no versions that agree.
$(VENV)/.bench: pyproject.toml
	$(call INSTALL,bench,$(VENV)/.demo)
	$(BIN)/python -m pip install --quiet \
		"boto3==$$($(BIN)/python -c 'import botocore; print(botocore.__version__)')"

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

# The oldest WebDataset that is supported, beside the one in the environment.
$(VENV)/webdataset-0.2.86: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --no-deps --target $@ webdataset==0.2.86

test: $(VENV)/.test $(VENV)/webdataset-0.2.86
	$(BIN)/python -m pytest $(PARALLEL)
	PYTHONPATH=$(CURDIR)/$(VENV)/webdataset-0.2.86 $(BIN)/python -m pytest $(PARALLEL) \
		tests/wds tests/dataset/test_pipeline.py 'tests/cli/test_run.py::test_workers_read_through_the_cache[fork]'

# The tests that depend most on the version of Python: forks, threads, the end of a process.
smoke: $(VENV)/.smoke
	$(BIN)/python -m pytest $(PARALLEL) tests/test_cache.py tests/test_processes.py \
		tests/download/test_threads.py tests/reading/test_forks.py

# Apart from `test`, of which it would be a third of the time. With the tests of Ray, which are
# among those of `stress`. Commands that tests start elsewhere write where the others do.
coverage: $(VENV)/.test
	$(BIN)/python -m coverage erase
	COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=
	COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/python -m pytest tests/stress/test_ray.py --cov \
		--cov-append --cov-report=term-missing:skip-covered

# Also runs tests with locks that fail: see tests/stress/brokensite.
stress: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) tests/stress
	for flock in refused lying; do \
		BROKEN_FLOCK=$$flock PYTHONPATH=$(CURDIR)/tests/stress/brokensite $(BIN)/python -m pytest \
			tests/test_cache.py \
			tests/download/test_coordination.py tests/store/test_partials.py tests/space/test_budget.py \
			|| exit; \
	done

# FUZZ multiplies the examples, and makes storms and soaks last half an hour each.
stress-full:
	FUZZ=100 $(MAKE) stress

# open_clip wants the oldest WebDataset, so it has an environment of its own. One command shows
# that both install together. The version is the one in docs/integrations.md.
$(VENV)/open_clip/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --editable . 'open_clip_torch[training]==3.3.0'
	@touch $@

# In one process: each test starts some of its own.
test-integrations: $(VENV)/.test-integrations $(VENV)/open_clip/.installed
	$(BIN)/python -m pytest tests/packages

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pip check

# Asks a database of known vulnerabilities on the network.
audit: $(VENV)/.test
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.report $(BENCH)

docs: $(VENV)/.test
	$(BIN)/python docs/generate.py

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	mkdir -p .site/examples
	cp examples/*.* .site/examples
	cp CONTRIBUTING.md .site

clean:
	rm -rf .venv .venv-3.* .site .venv.lock .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
