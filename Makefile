# make help lists the targets; everything is installed in .venv.
SHELL := /bin/bash
ACCELERATOR ?= cpu
PY := .venv/bin/python
# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
RUN ?= runs/tiny
ARGS ?=

# Parts of make prove, each meant for at most half an hour on two cores.
PROVE_ops := tests/ops
PROVE_schedules := tests/pipeline/test_pipeline_executor.py tests/pipeline/test_pipeline_gate.py tests/pipeline/test_pipeline_work.py
PROVE_pipelines := tests/pipeline/test_pipelined_checkpoints.py tests/pipeline/test_pipelined_training.py
PROVE_programs := tests/pipeline/test_pipelined_program.py tests/program
PROVE_package := tests/docs/test_docs.py tests/test_package.py
PROVE_faults := tests/checkpoint/test_memory.py tests/prove/test_faults.py tests/train/test_signals.py tests/train/test_replay.py
PROVE_campaign := tests/prove/test_campaign.py
PROVE_campaign_jobs := tests/prove/test_campaign_jobs.py
PROVE_local_tier := tests/prove/test_local_tier.py
PROVE_processes := tests/prove/test_processes.py
PROVE_hub := tests/prove/test_hub_reference.py
PROVE_precision := tests/prove/test_low_precision.py tests/train/test_recipe_run.py
PROVE_random := tests/prove/test_random_configurations.py tests/prove/test_random_pipelines.py
PROVE_supervisor := tests/launch/test_supervised_runs.py tests/launch/test_supervisor.py tests/launch/test_nodes.py
PROVE_schedulers := tests/prove/test_schedulers.py tests/prove/test_network.py
PROVE_structures := tests/prove/test_shipped_structures.py
PROVE_settings := tests/prove/test_shipped_settings.py
PROVE_mixtures := tests/prove/test_shipped_mixtures.py
PROVE_context := tests/train/test_context_training.py
PROVE_layouts := tests/train/test_mixture_layouts.py tests/train/test_mtp_layouts.py
PARTS := $(sort $(patsubst PROVE_%,%,$(filter PROVE_%,$(.VARIABLES))))
PART ?=
ifneq ($(PART),)
ifeq ($(PROVE_$(PART)),)
$(error there is no part $(PART) of make prove; parts: $(PARTS))
endif
endif

.PHONY: help setup setup-plan train test lint prove report docs docs-plots clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: ACCELERATOR=cpu|cuda12|cuda13 (setup), RUN=DIR (train), ARGS='...' (train, test, prove, report)"
	@echo "  parts of prove: $(PARTS)"

setup: .venv/ready-$(ACCELERATOR)  ## install jaxtrain's dependencies in .venv

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "jaxtrain needs Python 3.12 or newer on PATH (or make PYTHON=/path/to/python)"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/ready-cpu: requirements.txt | .venv/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/ready-cuda12 .venv/ready-cuda13: .venv/ready-cuda%: requirements.txt requirements-gpu.txt | .venv/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-gpu.txt "jax[cuda$*]==$$(sed -n 's/^jax==\([^ ]*\).*/\1/p' requirements.txt)"
	@touch .venv/ready-cpu $@

.venv/ready-dev: requirements-dev.txt | .venv/ready-$(ACCELERATOR)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# The GPU compiler is not installed beside the other packages: jax would load it at each start, and warn.
setup-plan: .venv/ready-plan  ## install the GPU compiler that jaxtrain compile uses (half a GB)

.venv/ready-plan: requirements-plan.txt .venv/ready-$(ACCELERATOR)
	rm -rf .venv/plan
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/plan -r requirements-plan.txt
	@touch $@

train: setup  ## train configs/tiny.yaml in RUN
	$(PY) -m jaxtrain train configs/tiny.yaml --run $(RUN) $(ARGS)

test: .venv/ready-dev .venv/ready-plan  ## run the tests (within 20 minutes on two cores)
	$(PY) -m pytest tests -n 2 --dist worksteal -m "not prove" $(ARGS)

prove: .venv/ready-dev .venv/ready-plan  ## run the long proofs; PART=NAME runs one part
	$(PY) -m pytest $(or $(PROVE_$(PART)),tests) -m prove --hypothesis-profile default $(ARGS)

report: .venv/ready-plan  ## measure the numbers of the documentation
	$(PY) tools/report.py $(ARGS)

# The site opens from files: site/index.html.
docs: .venv/ready-dev  ## build the documentation in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "open site/index.html"

docs-plots: .venv/ready-$(ACCELERATOR)  ## draw the plots of the documentation
	$(PY) tools/docs/plots.py

lint: .venv/ready-dev  ## check style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy jaxtrain tools/bench tools/faults tools/report.py

clean:  ## remove .venv, runs and caches
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
