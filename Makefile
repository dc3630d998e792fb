# Coldblock: every target sets up what it needs, and does nothing twice.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TYPING := build/typing/coldblock
TYPED := protocol engine_core/control frontend
MODEL ?= smollm2-135m
INSTALLED := $(or $(shell cat $(STAMP) 2>/dev/null),cuda12)
CUDA ?= $(INSTALLED)
OTHER_CUPY := $(if $(filter cuda12,$(CUDA)),cupy-cuda13x,cupy-cuda12x)

.DEFAULT_GOAL := help
.PHONY: help install run serve test test-gpu lint typecheck bench clean
ifneq ($(CUDA),$(INSTALLED)) # another choice than what is there
.PHONY: $(STAMP)
endif

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv with everything, once

$(STAMP): pyproject.toml constraints.txt
	@case $(CUDA) in cuda12|cuda13) ;; *) echo "CUDA=$(CUDA) is not allowed: cuda12 or cuda13" >&2; exit 2;; esac
	@$(BIN)/pip --version >/dev/null 2>&1 || (echo "Creating $(VENV) ($$($(PYTHON) --version))" && $(PYTHON) -m venv --clear $(VENV))
	@$(BIN)/python -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
		"Python 3.11 to 3.13 is needed, $(VENV) has %d.%d: remove $(VENV) and call make PYTHON=python3.12" % v)'
	@echo "Installing Coldblock and what it needs into $(VENV) (torch is large: the first time takes minutes)"
	@$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt torch
	@echo "Installing the rest (quietly)"
	@$(BIN)/pip uninstall --quiet --yes $(OTHER_CUPY) 2>/dev/null
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,$(CUDA)]'
	@echo $(CUDA) >$@

run: $(STAMP) ## two chat answers, one small KV pool: see a swap happen
	@$(BIN)/coldblock demo

serve: $(STAMP) ## serve $(MODEL) on http://127.0.0.1:8000/v1
	@$(BIN)/coldblock serve $(MODEL) || test $$? -eq 130 # Ctrl-C is how it ends

test: $(STAMP) ## all tests that need no GPU
	@$(BIN)/coldblock fetch-model smollm2-135m
	@$(BIN)/pytest -m 'not gpu'

test-gpu: $(STAMP) ## the tests that need a CUDA device
	@$(BIN)/pytest -m gpu

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

typecheck: $(STAMP) ## mypy --strict on what decides and what is public
	@mkdir -p $(TYPING)
	@for part in __init__.py settings.py logs.py progress.py engine_core frontend kernels protocol tools; do ln -sfn ../../../$$part $(TYPING)/$$part; done
	@cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml $(addprefix coldblock/,$(TYPED))

bench: $(STAMP) ## the benchmarks, into docs/results
	@$(BIN)/coldblock bench serve --model $(MODEL)
	@$(BIN)/coldblock bench swap --model $(MODEL)
	@$(BIN)/coldblock bench jitter --model $(MODEL)

clean: ## remove .venv and everything that was built; fetched models stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
