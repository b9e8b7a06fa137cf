# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint unit bench clean

demo: $(VENV)/.ready
	@$(BIN)/python examples/demo.py

test: lint unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

bench: $(VENV)/.ready
	$(BIN)/python bench/recovery.py

# torch first and by version: anything that depends on it would pull a build with CUDA.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Holdfast needs Python 3.10 or newer; say which with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (torch is large; this happens once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0 numpy
	@$(PIP) -e '.[dev]'
	@$(BIN)/python -m compileall -q holdfast
	@touch $@

clean:
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
