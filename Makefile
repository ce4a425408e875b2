# Two commands that need nothing but Python 3.11 or newer and do all their own set-up:
#   make demo   eight node daemons on this machine answer prompts with the demo model
#   make test   formatting, lint, import contracts, types and all tests
# Others: make install (what both begin with), make lint, make clean.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := 3.11

# The first interpreter that is new enough; `make PYTHON=/path/to/python3.12 install` chooses another.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < ($(subst .,$(comma),$(OLDEST))))' 2>/dev/null && echo "$$name" && break; done)
comma := ,

PYTEST_ARGS ?=
DEMO_ARGS ?=

.PHONY: help install demo test lint clean

help:
	@sed -n '2,4s/^# *//p' Makefile

install: $(INSTALLED)

# Made again when what it installs has changed; the sources of the extension count, Python files do not.
$(INSTALLED): pyproject.toml constraints.txt $(wildcard setup.py kernels/cpu/native/*)
	@if [ -z "$(PYTHON)" ]; then \
		echo "edge-runtime needs Python $(OLDEST) or newer; python3 here is $$(python3 --version 2>&1 | head -n 1)." \
			"Install one, or name it: make PYTHON=/path/to/python$(OLDEST) install" >&2; exit 2; fi
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV) || { \
			echo "could not make a virtual environment: on Debian and Ubuntu, apt install python3-venv" >&2; exit 2; }; fi
	@echo "installing edge-runtime and its dependencies into $(VENV); the first time takes a few minutes (torch is large)"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade "pip>=25"
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: install
	$(BIN)/python -m testbed.demo $(DEMO_ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: install lint
	$(BIN)/python -m pytest -q --numprocesses=2 --dist=loadscope --no-loadscope-reorder $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete
