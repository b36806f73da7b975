# Two commands for a newcomer: `make demo` and `make test`. Both set up their own .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# on all cores, which pip does not do; packages may hold files that are of other Pythons
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv/lib || true
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint slow docs faults dist clean

demo: .venv/demo.ready
	$(BIN)/esper demo

test: lint
	$(BIN)/python -m pytest -n 2 -m 'not slow and not ranks'
	$(BIN)/python -m pytest -n 2 -m 'ranks and not slow' $$(grep -rl --include='*.py' mark.ranks tests)

slow: .venv/slow.ready
	$(BIN)/python -m pytest -n 2 -m slow

docs: .venv/docs.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/. To search in it: $(BIN)/mkdocs serve"

faults: .venv/dev.ready
	PYTHONPATH=tests $(BIN)/python -m tools.faults --page $(FAULTS)

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

.venv/slow.ready: .venv/dev.ready
	$(INSTALL) --editable '.[slow]'
	$(COMPILE)
	touch $@

.venv/docs.ready: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[docs]'
	$(COMPILE)
	touch $@

dist: .venv/dev.ready
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf .venv site build dist src/*.egg-info
