PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help quickstart test check format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  prepare, train, evaluate and report on this machine, in about ten minutes"
	@echo "make test        run the tests"
	@echo "make check       format, lint and types"
	@echo "make format      rewrite the sources in the project's format"
	@echo "make bench       run the benchmarks"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/lex-pretrain quickstart $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench]'
	touch $@

bench: $(VENV)/.installed-bench
	$(BIN)/python -m tests.benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
