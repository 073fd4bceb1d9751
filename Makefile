# Everything starts from Python and make; nothing else has to be installed first.
PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
CLEAN ?= .venv-wheel
BIN := $(VENV)/bin
EXTRAS := train,qlora,ray,remote,shards,bench,examples,loggers,dev
PIP_INSTALL := -m pip install --disable-pip-version-check
PINNED := --constraint requirements/constraints.txt
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Compiled modules are kept, also where images turn that off: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =
# Tests run side by side already; one more than there are cores, since some of them wait for processes they started.
export OMP_NUM_THREADS ?= 1
PYTEST_WORKERS ?= $(shell expr $$(env -u OMP_NUM_THREADS nproc) + 1)
BESIDE := -n $(PYTEST_WORKERS) --dist worksteal

.PHONY: help install demo picture reference test test-full lint types unit oldest dist test-dist clean lock

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

install: $(VENV)/.installed  ## set up $(VENV) with the pinned versions

$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --quiet $(PINNED) --editable ".[$(EXTRAS)]"
	touch $(VENV)/.demo $@

demo: $(VENV)/.demo  ## make a small dataset and run the whole pipeline on it (installs torch, then takes 3 minutes)
	$(BIN)/packtrain demo

picture: demo  ## take the README's picture of the demo's report, with Chromium
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,1180 \
		--screenshot=docs/report.png packtrain-demo/report.html

reference: install  ## write the pages that follow from the code: docs/reference/cli.md and config.md
	$(BIN)/python scripts/reference.py

# Only what the demo needs; the rest comes with make install.
$(VENV)/.demo: pyproject.toml requirements/constraints.txt
	@echo "Installing packtrain with torch and transformers into $(VENV), once: several gigabytes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) $(PINNED) --editable ".[train]"
	touch $@

lint: install
	$(BIN)/ruff check src tests examples scripts
	$(BIN)/ruff format --check src tests examples scripts

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest $(BESIDE) -m "not full and not ray"

test: lint types unit  ## lint, types and the quick tests (under 10 minutes)

test-full: install oldest  ## what takes longer: every family, faults, Ray, the oldest supported versions (under 45 minutes)
	$(BIN)/python -m pytest $(BESIDE) -m "full and not ray"
	$(BIN)/python -m pytest -m ray tests/measuring
	$(OLDEST)/bin/python -m pytest $(BESIDE) -m "contract and not more"

oldest: $(OLDEST)/.installed

$(OLDEST)/.installed: pyproject.toml requirements/constraints.txt requirements/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) --quiet --constraint requirements/oldest.txt --editable ".[train,dev]"
	touch $@

dist: install  ## build the wheel, by way of the source distribution, into dist/
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .

test-dist: dist  ## run a short demo from the wheel, in a new environment and outside of the clone
	$(PYTHON) -m venv --clear $(CLEAN)
	$(CLEAN)/bin/python $(PIP_INSTALL) --quiet $(PINNED) "$$(ls dist/*.whl)[train]"
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && command="$$PWD/$(CLEAN)/bin/packtrain" && cd "$$folder" && \
		env -u PYTHONPATH PACKTRAIN_CACHE="$$folder/cache" "$$command" demo --pictures 40

lock:  ## write the versions installed in $(VENV) as the new constraints
	(echo "# The versions that development and CI use. make lock writes them again."; $(BIN)/python -m pip freeze --exclude-editable) > requirements/constraints.txt

clean:  ## remove what make and the tools created
	rm -rf $(VENV) $(OLDEST) $(CLEAN) .mypy_cache .ruff_cache build dist src/*.egg-info
