# One virtual environment for each SGLang version that is tested; `make test` is what CI runs.
PYTHON ?= python3
OLDEST := 0.5.17
NEWEST := 0.5.23

VENV := .venv/$(OLDEST)
READY := $(OLDEST:%=.venv/%/.ready) $(NEWEST:%=.venv/%/.ready)
PIP := python -m pip --disable-pip-version-check

# Pages of the API reference; sgl_fp8rl itself only re-exports from trainer_bridge and server_args.
API := trainer_bridge trainer_bridge.correction trainer_bridge.correction.config trainer_bridge.metrics \
	trainer_bridge.router_replay server_args sgl_fp8rl.options

# The test models are tiny: more threads only wait for each other.
export OMP_NUM_THREADS ?= 1

.PRECIOUS: .venv/%/.ready
.PHONY: test test-full fast lint demo api wheel clean

# An environment that cannot be made is a failure of its suites alone: tests/run.py reports it.
test test-full:
	-$(MAKE) --keep-going $(READY)
	$(PYTHON) tests/run.py $@ $(RUN_FLAGS)

test-full: RUN_FLAGS := --record tests/FULL.md

fast: $(VENV)/.ready
	$(PYTHON) tests/run.py fast

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

demo: $(VENV)/.ready
	$(VENV)/bin/python -m examples.grpo

api: $(VENV)/.ready
	rm -rf build/api
	$(VENV)/bin/python -m pdoc --docformat google --output-directory build/api $(API)

wheel: $(VENV)/.ready
	rm -rf build
	$(VENV)/bin/python -m build --wheel --no-isolation

.venv/%/.ready: constraints/sglang-%.txt pyproject.toml
	$(PYTHON) -m venv .venv/$*
	.venv/$*/bin/$(PIP) install --constraint $< setuptools "sglang==$*" --editable ".[dev,examples]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
