# D2PLM: `make` shows what there is.
PYTHON ?= python3
VENV ?= .venv
PARADIGM ?= diffusion
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format mlflow-ui compile-pipeline submit-pipeline manifests lock clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv from requirements.lock

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("D2PLM needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

demo: $(STAMP) ## Prepare, train, evaluate, register, generate on 20,000 proteins (PARADIGM=diffusion|flow_matching)
	$(BIN)/d2plm pipeline run experiment=demo paradigm=$(PARADIGM)

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest -n auto --dist loadgroup

lint: $(STAMP) ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mlflow-ui: $(STAMP) ## Open the demo's MLflow UI on http://127.0.0.1:5000
	$(BIN)/mlflow ui --backend-store-uri sqlite:///runs/demo/mlflow.db --host 127.0.0.1

compile-pipeline: $(STAMP) ## Write pipeline.yaml for Kubeflow Pipelines
	$(BIN)/d2plm pipeline compile experiment=demo paradigm=$(PARADIGM) work_dir=/workspace/demo data.input=/workspace/uniprot_20k.fasta.gz output=pipeline.yaml

submit-pipeline: $(STAMP) ## Submit the pipeline to the server at KFP_HOST
	$(BIN)/d2plm pipeline submit experiment=demo paradigm=$(PARADIGM) work_dir=/workspace/demo data.input=/workspace/uniprot_20k.fasta.gz

manifests: $(STAMP) ## Write k8s/pytorchjob.yaml and k8s/trainjob.yaml from d2plm/launch/jobs.py
	$(BIN)/d2plm job show experiment=cluster launcher=pytorchjob > k8s/pytorchjob.yaml
	$(BIN)/d2plm job show experiment=cluster launcher=trainjob > k8s/trainjob.yaml

lock: ## Write requirements.lock anew from pyproject.toml (needs the package index)
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet 'torch==2.13.0' hatchling editables '.[pipelines,tracking-server,tensorboard,wandb,dev]'
	.lock-venv/bin/pip freeze --exclude d2plm | sed 's/+cpu$$//' > requirements.lock
	rm -rf .lock-venv

clean: ## Remove the environment and all runs
	rm -rf $(VENV) runs
