# `make train` and `make test` do all set-up themselves; nothing has to be installed first.
#
#   make train MODEL_DIR=/elsewhere         another run folder
#   make train ARGS=--gin.TRAIN_STEPS=100   further arguments of `switchx train`
#   make test ARGS="tests/moe -x"           further arguments of pytest
#   make test WORKERS=8                     so many files of tests at a time
#   make promises ARGS=mesh_loss_parity     what holds or does not, all or by name
#   make experiments EXPERIMENT=NAME DATA=FOLDER QUICK=1   a smoke of one experiment
#   make test PYTHON=python3.12             the Python that .venv is made of

# The first of these that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$python"; exit; }; done; echo python3)
VENV ?= .venv
MODEL_DIR ?= runs/pretrain_tiny
ARGS ?=
OUTPUT ?= runs/experiments
# A test's compilation keeps one core busy, most of the time. Files are begun in our order.
WORKERS ?= 2
# What machines with cards have, beside the JAX of this Python; a Python of 3.12 or newer for it.
NEWER_JAX := 0.11 0.12
NEWER_PYTHON ?=
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin

.PHONY: help train tiny picture notebooks test test-all test-aot promises scale experiments size \
	docs release lint clean

help:
	@echo 'make train     pretrain a small Switch T5 on real text (MODEL_DIR=$(MODEL_DIR))'
	@echo 'make test      the default tests'
	@echo 'make test-all  every test, those against PyTorch included (installs it)'
	@echo 'make test-aot  kernels compiled for TPUs and an H200 (installs the compilers, 4 GB)'
	@echo 'make promises  what holds or does not: value, bound (ARGS="NAME ... --json"), an hour'
	@echo 'make scale     docs/compiled.md: the Switch models compiled for pods again (an hour)'
	@echo 'make experiments EXPERIMENT=NAME DATA=FOLDER  one of experiments/, hours'
	@echo 'make picture   what README.md shows of the model that ships, made anew (4 minutes)'
	@echo 'make notebooks both notebooks of experiments/first_steps, run, with outputs'
	@echo 'make size      Python lines by folder, against a committed budget'
	@echo 'make docs      the manual as a site, in site/ (2 minutes)'
	@echo 'make release   sdists and wheels in dist/, used in environments of their own (10 minutes)'
	@echo 'make lint      ruff: errors and formatting'
	@echo 'make clean     remove $(VENV), builds and caches; run folders stay'

train: $(VENV)/.installed
	$(BIN)/switchx train --gin_file=configs/runs/pretrain_tiny.gin --model_dir=$(MODEL_DIR) $(ARGS)

# The model that ships; a new one is committed by hand.
tiny: $(VENV)/.installed
	$(BIN)/switchx train --gin_file=configs/runs/pretrain_shipped.gin --model_dir=runs/shipped
	rm -rf switchx/shipped/tiny
	$(BIN)/switchx quantize --model_dir=runs/shipped --output=switchx/shipped/tiny --bits=4 --rest=bfloat16

picture: $(VENV)/.installed
	$(BIN)/python -m experiments.first_screen picture

notebooks: $(VENV)/.installed-notebooks
	$(BIN)/python -m experiments.first_screen notebooks

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow and not aot" $(ARGS)

test-all: $(VENV)/.installed-dev $(VENV)/.installed-hf $(VENV)/.installed-docs
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

# The compilers stay off the environment's path: JAX would take the machine for their hardware.
test-aot: $(VENV)/.installed-dev $(VENV)/aot_tpu/.installed $(VENV)/aot_gpu/.installed \
		$(NEWER_JAX:%=$(VENV)/aot_jax/%/.installed)
	SWITCHX_AOT_TPU=$(abspath $(VENV)/aot_tpu) SWITCHX_AOT_GPU=$(abspath $(VENV)/aot_gpu) \
		SWITCHX_AOT_JAX=$(abspath $(VENV)/aot_jax) $(BIN)/python -m pytest -m aot $(ARGS)

# Names of checks, or --json, are ARGS; without the TPU compiler it says what it leaves out.
promises: $(VENV)/.installed-dev
	$(BIN)/python -m tests.promises $(ARGS)

scale: $(VENV)/.installed $(VENV)/aot_tpu/.installed
	SWITCHX_AOT_TPU=$(abspath $(VENV)/aot_tpu) $(BIN)/python -m experiments.scale $(ARGS)

# Without EXPERIMENT: the pages made anew of results.json.
experiments: $(VENV)/.installed
	@test -z "$(EXPERIMENT)" || test -f experiments/$(EXPERIMENT)/run.py || { \
		echo "no experiment $(EXPERIMENT); there are $(notdir $(patsubst %/run.py,%,$(wildcard experiments/*/run.py)))"; exit 2; }
	$(BIN)/python -m experiments.$(if $(EXPERIMENT),$(EXPERIMENT).run \
		--output=$(OUTPUT) $(if $(DATA),--data=$(DATA)) $(if $(QUICK),--quick),pages) $(ARGS)
	@test -n "$(EXPERIMENT)" || $(BIN)/python -m experiments.accelerator.pages

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

size: $(VENV)/.installed-dev
	$(BIN)/python -m tests.sizes

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

release: $(VENV)/.installed-dev
	$(BIN)/python -m tests.release dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find switchx pallas_kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what a virtual environment holds is installed again when setup.cfg changes.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "switchx needs Python 3.11 or newer; $(PYTHON) is" \
			"$$($(PYTHON) --version 2>/dev/null || echo not there);" \
			"name another one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created setup.cfg pyproject.toml
	@echo 'Installing switchx into $(VENV) (a minute or two) ...'
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	@echo 'Installing what the extra "$*" needs ...'
	@$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(VENV)/aot_jax/%/.installed: $(VENV)/.installed
	@echo 'Installing JAX $* and its compiler of kernels into $(@D) ...'
	@NEWER_PYTHON=$(NEWER_PYTHON) $(BIN)/python -m pallas_kernels.aot.install jax-$* $(@D)
	@touch $@

$(VENV)/aot_%/.installed: $(VENV)/.installed
	@echo 'Installing the compiler of $* kernels into $(@D) ...'
	@$(BIN)/python -m pallas_kernels.aot.install $* $(@D)
	@touch $@
