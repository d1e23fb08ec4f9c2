# The two commands of the README: `make demo` and `make test`. Both create $(VENV) the first time.
#
#   PYTHON      interpreter to build the environment with          (python3)
#   VENV        where it goes                                      (.venv)
#   PYTEST_ARGS more arguments for pytest, e.g. "-k parity -x"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# One thread per process: demo and tests start several ranks on few cores.
export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
TAG := $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
# The tested versions for this Python; on a Python without such a file pip chooses by itself.
PINS := $(wildcard constraints/$(TAG).txt)
# What tests use if it is there, and whose declared dependencies are too many.
NO_DEPS := $(wildcard constraints/$(TAG)-no-deps.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test check format clean

help:
	@echo "make demo    train a small GPT on the standard library's source, tp=2 x pp=2 x vpp=2"
	@echo "make test    run the test suite"
	@echo "make check   ruff and mypy"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove $(VENV) and caches"

# Without python3-venv, Debian's venv cannot put pip inside; pip itself can (--python).
# The editable install reads the sources in place: only the metadata can make it stale.
$(STAMP): pyproject.toml $(PINS) $(NO_DEPS)
	@test -n "$(TAG)" || { echo "$(PYTHON) does not run; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -n "$(PINS)" || echo "No tested versions for $(TAG): pip chooses them." >&2
	@echo "Installing into $(VENV) with $(PINS): a few minutes the first time."
	@test -x $(BIN)/python && $(PIP) --version >/dev/null 2>&1 \
		|| $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
		|| { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
			&& $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@$(PIP) install -qq --editable '.[dev]' $(addprefix --constraint ,$(PINS))
	@test -z "$(NO_DEPS)" || $(PIP) install -qq --no-deps --requirement $(NO_DEPS)
	@touch $@

# The engine warns in every process about kernels that a small machine cannot have.
demo: $(STAMP)
	PYTHONWARNINGS=ignore::UserWarning,ignore::FutureWarning $(BIN)/python examples/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
