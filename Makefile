PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help quickstart test check format bench paper-mini paper-mini-data clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  prepare, train, evaluate and report on this machine, in about ten minutes"
	@echo "make test        run the tests"
	@echo "make check       format, lint and types"
	@echo "make format      rewrite the sources in the project's format"
	@echo "make bench       run the benchmarks"
	@echo "make paper-mini  train and compare four position schemes as in the paper, for each of SEEDS"

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
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 $(ARGS)

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

# Every command goes on where it was stopped. CORPUS is anything that `lex-pretrain prepare` reads. Two models at a time with
# one thread each (OMP_NUM_THREADS=1 make -j2 paper-mini) take less time than one after the other with two.
SEEDS ?= 1
STEPS ?= 600
POSITIONS := absolute alibi rope xpos
MINI := paper-mini
CORPUS ?= '$(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")/**/*.py'
MINI_LENGTHS := 32,64,128,256,512,1024,2048,8192
MINI_DOCUMENTS ?= 16
MINI_EVALUATIONS := $(foreach seed,$(SEEDS),$(foreach position,$(POSITIONS),$(MINI)/$(position)-$(seed)-evaluation))

paper-mini: $(MINI_EVALUATIONS:=/report.html)
	$(BIN)/lex-pretrain compare $(MINI_EVALUATIONS) --output $(MINI)/comparison

# Not a file's rule: `prepare` knows whether its data is whole and of this corpus.
paper-mini-data: $(VENV)/.installed
	$(BIN)/lex-pretrain prepare $(CORPUS) --output $(MINI)/data --vocab-size 2048 --validation-fraction 0.02 \
		--test-fraction 0.1 --unit-bytes 4194304 --max-rejected 5%

$(MINI)/%-evaluation/report.html: | paper-mini-data
	$(BIN)/lex-pretrain train --config configs/paper-mini/$(firstword $(subst -, ,$*)).yaml \
		run.seed=$(lastword $(subst -, ,$*)) run.output_dir=$(MINI)/$* data.path=$(MINI)/data train.num_steps=$(STEPS)
	$(BIN)/lex-pretrain evaluate $(MINI)/$* --data $(MINI)/data --lengths $(MINI_LENGTHS) --attention causal,blockwise \
		--max-documents $(MINI_DOCUMENTS) --retrieval-trials 0 --output $(@D)

clean:
	rm -rf $(VENV) build *.egg-info
