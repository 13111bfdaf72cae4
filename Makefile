# make benchmark | test | test-all | mutants | lint | docs | records-data | clean
#
# Each sets up .venv from a fresh clone with pip alone. PYTHON=python3.12 picks the
# interpreter; VENV=0 uses the packages that this interpreter already has.

VENV ?= .venv
# A version manager may leave a python3.x on the PATH that does not start: run it before choosing.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

ifeq ($(PYTHON),)
$(error no Python 3.11 or newer runs here: install one, or name it with PYTHON=/path/to/python3)
endif

ifeq ($(VENV),0)
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

# A benchmark starts a process a rank, the tests some hundred: compiled once, each is there sooner.
unexport PYTHONDONTWRITEBYTECODE

# tests/conftest.py says how many processes run tests; one has all tests of a file, in order.
IN_PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

.PHONY: benchmark test test-all mutants lint docs records-data clean
.DELETE_ON_ERROR:

benchmark: $(READY)
	$(RUN) benchmark_ddp.py $(ARGS)

test: lint
	$(RUN) -m pytest -m "not slow" $(IN_PARALLEL) --durations=15 $(ARGS)

test-all: lint
	$(RUN) -m pytest --durations=15 $(ARGS)

# Results are kept in mutants.jsonl, and a second call goes on. It takes hours.
mutants: $(READY)
	$(RUN) -m tests.support.mutation_score $(ARGS)

lint: docs
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -c 'from importlinter.cli import lint_imports_command as run; run()'
	$(RUN) -m mypy

# The site, in site/, without a network. A link that leads nowhere is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Fashion-MNIST, 31 MB, from Debian's package: unpacked, not installed, so without root.
records-data: data/usr/share/datasets/fashion-mnist
data/usr/share/datasets/fashion-mnist:
	mkdir -p data
	cd data && apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb .
	rm data/dataset-fashion-mnist_*.deb

# ensurepip is missing from some distributions' Python: virtualenv, itself from pip, stands in.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); \
		$(PYTHON) -m pip install --user --break-system-packages virtualenv && \
		$(PYTHON) -m virtualenv $(VENV); }
	@echo "installing PyTorch and what else is needed into $(VENV): some minutes the first time"
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test,docs]'
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .mypy_cache
