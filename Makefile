# make train | test | lint | prove | report | docs | setup [ACCELERATOR=cuda13] | setup-plan; everything lives in .venv.
SHELL := /bin/bash
ACCELERATOR ?= cpu
PY := .venv/bin/python
# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
RUN ?= runs/tiny
ARGS ?=

.PHONY: setup setup-plan train test lint prove report docs docs-plots clean

setup: .venv/ready-$(ACCELERATOR)

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

# The GPU compiler for jaxtrain compile stands beside the other packages: jax would load it, and complain, at each start.
setup-plan: .venv/ready-plan

.venv/ready-plan: requirements-plan.txt .venv/ready-$(ACCELERATOR)
	rm -rf .venv/plan
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/plan -r requirements-plan.txt
	@touch $@

train: setup
	$(PY) -m jaxtrain train configs/tiny.yaml --run $(RUN) $(ARGS)

test: .venv/ready-dev .venv/ready-plan
	$(PY) -m pytest tests -n 2 --dist worksteal -m "not prove" $(ARGS)

prove: .venv/ready-dev .venv/ready-plan
	$(PY) -m pytest tests -m prove --hypothesis-profile default $(ARGS)

report: .venv/ready-plan
	$(PY) tools/report.py $(ARGS)

# The site opens from files: site/index.html.
docs: .venv/ready-dev
	$(PY) -m mkdocs build --strict --quiet

docs-plots: .venv/ready-$(ACCELERATOR)
	$(PY) tools/docs/plots.py

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy jaxtrain tools/bench tools/report.py

clean:
	rm -rf .venv runs site .pytest_cache .mypy_cache .ruff_cache
