# D2PLM: `make` shows what there is.
PYTHON ?= python3
VENV ?= .venv
PARADIGM ?= diffusion
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' d2plm/__init__.py)
TAG ?= $(VERSION)
# A prefix for the images' names, such as registry.example/you; empty: none.
REGISTRY ?=
CONTAINER_ENGINE ?= $(firstword $(notdir $(foreach engine,docker podman buildah,$(shell command -v $(engine)))) docker)
# torch in the trainer's image: cpu or cuda.
VARIANT ?= cpu
# A pip.conf that the builds read and the images do not keep: mirrors, passwords.
PIP_CONFIG ?=
BUILD_FLAGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format mlflow-ui compile-pipeline submit-pipeline images image-trainer image-mmseqs2 image-mlflow \
	check-images check-trainer check-mmseqs2 check-mlflow check-pipeline lock clean

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

images: image-trainer image-mmseqs2 image-mlflow ## Build the images (CONTAINER_ENGINE=docker|podman REGISTRY= TAG= VARIANT=cpu|cuda)

TORCH_INDEX_cpu := https://download.pytorch.org/whl/cpu
# PyPI's own build is the one for CUDA 13.0.
TORCH_INDEX_cuda := https://pypi.org/simple
TORCH_INDEX ?= $(TORCH_INDEX_$(VARIANT))

image-trainer: BUILD_ARGUMENTS = --build-arg TORCH_INDEX=$(or $(TORCH_INDEX),$(error VARIANT=$(VARIANT): give cpu or cuda))

image-trainer image-mmseqs2 image-mlflow: image-%:
	DOCKER_BUILDKIT=1 $(CONTAINER_ENGINE) build --file docker/$*.Dockerfile --tag $(call image,$*) \
		--build-arg VERSION=$(VERSION) \
		--build-arg REVISION=$$(git describe --always --dirty --abbrev=40 --exclude='*') \
		--build-arg CREATED=$$(date -u +%Y-%m-%dT%H:%M:%SZ) \
		$(if $(PIP_CONFIG),--secret id=pip$(comma)src=$(PIP_CONFIG)) $(BUILD_ARGUMENTS) $(BUILD_FLAGS) .

image = $(if $(REGISTRY),$(REGISTRY:/=)/)d2plm-$(1):$(TAG)
comma := ,

check-images: check-trainer check-mmseqs2 check-mlflow check-pipeline ## Run the images as pods do: any user, nothing writable but /tmp

check-pipeline: CHECKED = trainer
check-trainer check-mmseqs2 check-mlflow check-pipeline: check-%:
	$(CONTAINER_ENGINE) run --rm --interactive --read-only --user 12345:12345 \
		--tmpfs /tmp:mode=1777 --shm-size 1g --cap-drop ALL --security-opt no-new-privileges \
		--entrypoint sh $(call image,$(or $(CHECKED),$*)) -s < docker/smoke/$*.sh

lock: ## Write requirements.lock anew from pyproject.toml (needs the package index)
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet 'torch==2.13.0' hatchling editables '.[pipelines,tracking-server,tensorboard,wandb,dev]'
	.lock-venv/bin/pip freeze --exclude d2plm | sed 's/+cpu$$//' > requirements.lock
	rm -rf .lock-venv

clean: ## Remove the environment and all runs
	rm -rf $(VENV) runs
