# The two commands of the README are `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
DEV = requirements-dev.txt requirements-hf.txt requirements-examples.txt

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make .venv and install what training needs

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than Python 3.10: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(DEV) $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt $(DEV:%=-r %)
	@touch $@

quickstart: install  ## prepare an embedded corpus, train a small GPT with Sophia-G, sample from it, draw its loss
	$(PY) data/pysource/prepare.py
	rm -rf out/quickstart
	$(PY) train.py config/quickstart.py
	$(PY) scripts/sample.py --out_dir=out/quickstart --num_samples=1 --max_new_tokens=400
	$(PY) scripts/plot.py out/quickstart --output out/quickstart/loss.png

test: $(VENV)/.installed-dev  ## run the tests (no GPU, no download of data)
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev  ## ruff
	$(PY) -m ruff check .

clean:  ## remove runs and prepared data; keeps .venv
	rm -rf out build *.egg-info data/*/*.bin data/*/*.bin.part data/*/meta.json data/*/progress.json data/*/prepare.lock data/*/*.partial

.PHONY: help install quickstart test lint clean
.DEFAULT_GOAL := help
