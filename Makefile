# One virtual environment for each SGLang version that is tested; `make test` is what CI runs.
PYTHON ?= python3
OLDEST := 0.5.17
NEWEST := 0.5.23
VERSIONS := $(OLDEST) $(NEWEST)

VENV := .venv/$(OLDEST)
PIP := python -m pip --disable-pip-version-check --quiet

# The test models are tiny: more threads only wait for each other.
export OMP_NUM_THREADS ?= 1

.PRECIOUS: .venv/%/.ready
.PHONY: test test-full fast lint demo wheel clean
# Two side by side: an engine mostly starts, which takes one core. The newest version follows `fast`.
test: $(VENV)/.ready
	$(MAKE) --jobs=2 --output-sync=target fast $(VERSIONS:%=engine-%)

test-full: $(VERSIONS:%=full-%)

fast: $(VENV)/.ready
	$(VENV)/bin/python -m pytest --durations=15 -m "not engine and not gpu"

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

demo: $(VENV)/.ready
	$(VENV)/bin/python examples/grpo.py

wheel: $(VENV)/.ready
	rm -rf build
	$(VENV)/bin/python -m build --wheel --no-isolation

# Each start of an engine takes 20 to 45 s. `make test` loads one family of each kind on the oldest
# version, and on the newest one whose loading it changed; `make test-full` loads all on both.
engine-$(OLDEST): export FP8RL_TEST_FAMILIES ?= \
	qwen2,glm4,mixtral,qwen3_ragged_kv,deepseek_v2
engine-$(NEWEST): export FP8RL_TEST_FAMILIES ?= gemma
# What the newest version leaves to `make test-full`: retraction resets the cache where the oldest
# could not, precision computes without SGLang, layers are listed by code that no version changed.
engine-$(NEWEST): export PYTEST_ADDOPTS ?= \
	--ignore=tests/engine/test_in_flight.py \
	--ignore=tests/engine/test_precision.py \
	--deselect=tests/sgl_fp8rl/test_cli.py::test_layers_of_a_real_engine \
	-k 'not retracted'

engine-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest --durations=15 -m "engine and not full and not gpu"

full-%: .venv/%/.ready
	.venv/$*/bin/python -m pytest -m "not gpu"

.venv/%/.ready: constraints/sglang-%.txt pyproject.toml
	$(PYTHON) -m venv .venv/$*
	.venv/$*/bin/$(PIP) install --constraint $< setuptools "sglang==$*" --editable ".[dev,examples]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
