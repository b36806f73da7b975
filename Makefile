# Two commands for a newcomer: `make demo` and `make test`. Both set up their own .venv.
PYTHON ?= python3
BIN := .venv/bin
# pip compiles on one core
COMPILE := $(BIN)/python -m compileall -q -j 2 .venv/lib >/dev/null || true
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint units slow clean

demo: .venv/demo.ready
	$(BIN)/esper demo

test: .venv/dev.ready
	$(MAKE) --jobs 2 lint units
	$(BIN)/python -m pytest -n 2 -m 'ranks and not slow'

units: .venv/dev.ready
	$(BIN)/python -m pytest -n 2 -m 'not slow and not ranks'

slow: .venv/dev.ready
	$(BIN)/python -m pytest -n 2 -m slow

lint: .venv/dev.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.ready: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[demo]'
	$(COMPILE)
	touch $@

.venv/dev.ready: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	$(COMPILE)
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
