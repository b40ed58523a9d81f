# The two commands of the README are `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
DEV = requirements-dev.txt requirements-hf.txt requirements-examples.txt

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make .venv and install the requirements of training

$(VENV)/.installed: requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON): no such program; name a Python of 3.10 or newer: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than Python 3.10: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(DEV) $(VENV)/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt $(DEV:%=-r %)
	@touch $@

# $(call ask,QUESTION) fails unless the answer is y.
ask = printf '%s [y/N] ' '$(1)'; read answer; test "$$answer" = y

# An interrupted run resumes; loss.png is made last, and after it the next run starts over.
quickstart: install  ## prepare an embedded corpus, train a small GPT with Sophia-G, sample from it, draw its loss
	@test ! -e out/quickstart/loss.png || { $(call ask,remove the finished run in out/quickstart?); }
	test ! -e out/quickstart/loss.png || rm -rf out/quickstart
	$(PY) data/pysource/prepare.py
	$(PY) train.py config/quickstart.py --auto_resume=True
	$(PY) scripts/sample.py out/quickstart --num_samples=1 --max_new_tokens=400
	$(PY) scripts/plot.py out/quickstart --output out/quickstart/loss.png

test: $(VENV)/.installed-dev  ## run the tests (no GPU, no download of data)
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev  ## ruff
	$(PY) -m ruff check .

clean:  ## remove build files and, after a y, the runs in out/; keeps .venv and data
	rm -rf build *.egg-info
	@test ! -e out || { du -sh out/*; $(call ask,remove these runs?); }
	rm -rf out

PREPARED = $(wildcard data/*/*.bin data/*/parts.* data/*/*.partial data/*/meta.json)

clean-data:  ## list the prepared data, some of it hours of work, and remove it after a y
	@test -n "$(PREPARED)" || { echo "no prepared data in data/"; exit 1; }
	@du -ch $(PREPARED)
	@$(call ask,remove these files?)
	rm -rf $(PREPARED)

.PHONY: help install quickstart test lint clean clean-data
.DEFAULT_GOAL := help
