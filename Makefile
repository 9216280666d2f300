# D2PLM: `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
PARADIGM ?= diffusion
SEED ?= 0
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' d2plm/__init__.py)

# Images. REGISTRY is a prefix of their names, such as registry.example/you; it may be empty. d2plm
# pipeline also reads D2PLM_REGISTRY and D2PLM_TAG.
REGISTRY ?= $(D2PLM_REGISTRY)
TAG ?= $(or $(D2PLM_TAG),$(VERSION))
CONTAINER_ENGINE ?= $(firstword $(notdir $(foreach engine,docker podman buildah,$(shell command -v $(engine)))) docker)
# Build of torch in the trainer's image: cpu or cuda.
VARIANT ?= cpu
# A pip.conf (mirrors, passwords) that the builds read and that is not stored in the images.
PIP_CONFIG ?=
BUILD_FLAGS ?=

# Each worker runs a contiguous part of the tests, so that a file's fixtures are set up once; idle
# workers take over remaining tests of others. The twenty slowest tests are listed.
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal --durations=20 --durations-min=1

# Output folder of make bench.
BENCH ?= bench

# Settings of the pipeline for compile-pipeline and submit-pipeline; d2plm pipeline --help.
PIPELINE = experiment=demo paradigm=$(PARADIGM) $(if $(REGISTRY),registry='$(REGISTRY)') tag='$(TAG)' $(SETTINGS)

# kind. The node image must match its version: https://github.com/kubernetes-sigs/kind/releases
CLUSTER ?= d2plm
KIND ?= kind
KUBECTL ?= kubectl
KIND_VERSION := v0.33.0
KUBERNETES_IMAGE ?= kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5
TRAINING_OPERATOR_VERSION := v1.9.3
TRAINER_VERSION := v2.3.0
KIND_CONTEXT = $(KUBECTL) --context kind-$(CLUSTER)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.tools
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint requirements.lock

.DEFAULT_GOAL := help
.PHONY: help setup tools demo pretrained test test-thorough test-matrix bench speedrun lint format docs mlflow-ui serve results compile-pipeline submit-pipeline manifests secrets \
	dist check-wheel images image-trainer image-mmseqs2 image-mlflow \
	check-images check-trainer check-mmseqs2 check-mlflow check-pipeline \
	kind-up kind-smoke kind-down lock clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with what the demo needs, in the versions of requirements.lock

tools: $(TOOLS) ## Add everything else of requirements.lock: for tests, pipelines on a cluster, trackers

# pip compiles no byte code for the demo: Python compiles what is used, and keeps it whatever the
# environment says. Tests use most of it, in many processes at once, so that it is compiled first,
# but for a few files that need a newer Python.
unexport PYTHONDONTWRITEBYTECODE
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("D2PLM needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[demo]'
	touch $@

$(TOOLS): $(STAMP)
	$(PIP) -r requirements.lock
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >$(VENV)/compiled.log || true
	touch $@

demo: $(STAMP) ## Prepare, train, evaluate, register and generate with 8,000 proteins (PARADIGM=diffusion|flow_matching)
	$(BIN)/d2plm pipeline run experiment=demo paradigm=$(PARADIGM)

pretrained: $(STAMP) ## Train and evaluate examples/pretrained, the shipped model, again (an hour or two; SEED=0; then make results)
	$(BIN)/d2plm pipeline run experiment=pretrained trainer.seed=$(SEED) work_dir=runs/pretrained/seed$(SEED) data.prepared_dir=runs/pretrained/data

test: $(TOOLS) ## Run all tests except the long matrices
	$(PYTEST) -m 'not thorough and not matrix'

test-thorough: $(TOOLS) ## Run the long matrices, and the property tests on many examples
	$(PYTEST) -m 'thorough and not matrix' --hypothesis-profile=thorough

test-matrix: $(TOOLS) ## Train with every three settings of parallelism, memory, model and optimizer
	$(PYTEST) -m matrix

bench: $(TOOLS) ## Measure the loader, a training step and trainers that pad on this machine (an hour; BENCH=output folder)
	$(BIN)/python -m benchmarks.data --output $(BENCH)/data.json
	$(BIN)/python -m benchmarks.step --model 2m --threads 1 --turns 30 --output $(BENCH)/step.json
	$(BIN)/python -m benchmarks.peers --output $(BENCH)/peers.json
	$(BIN)/python -m benchmarks.peers --longest-protein 700 --esm --turns 8 --output $(BENCH)/peers_short.json
	$(BIN)/python -m benchmarks.peers --turns 8 --precision fp32 --esm --output $(BENCH)/peers_fp32.json

speedrun: $(STAMP) ## Run the entries missing from benchmarks/speedrun/results.jsonl and print the table of docs/performance.md (hours)
	$(BIN)/d2plm prepare experiment=uniprot_20k
	$(BIN)/python -m benchmarks.speedrun.run --all --table

lint: $(TOOLS) ## Check format, style, types and Dockerfiles
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint --ignore DL3008 docker/*.Dockerfile
	$(BIN)/shellcheck --severity=warning k8s/kind/smoke.sh docker/*.sh docker/smoke/*.sh tests/*.sh .github/*.sh .ci/run .ci/budgets

format: $(TOOLS) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## Generate docs/configuration.md and configs/schema.json from d2plm/settings
	$(BIN)/python docs/configuration.py

mlflow-ui: $(STAMP) ## Open the demo's MLflow UI on http://127.0.0.1:5000
	$(BIN)/mlflow ui --backend-store-uri sqlite:///runs/demo/mlflow.db --host 127.0.0.1

serve: $(STAMP) ## Serve the demo's champion on http://127.0.0.1:8080 (PARADIGM=; docs/tracking.md)
	MLFLOW_TRACKING_URI=sqlite:///runs/demo/mlflow.db $(BIN)/d2plm serve models:/d2plm-$(PARADIGM)@champion

results: $(TOOLS) ## Update the shipped model, and the figures and pictures of README.md, from make pretrained (needs Chromium)
	$(BIN)/python docs/results.py

compile-pipeline: $(TOOLS) ## Write pipeline.yaml for Kubeflow Pipelines (REGISTRY= TAG=)
	$(BIN)/d2plm pipeline compile $(PIPELINE) output=pipeline.yaml

submit-pipeline: $(TOOLS) ## Submit the pipeline to the server at KFP_HOST (REGISTRY= TAG= NAMESPACE= WAIT=1)
	$(if $(NAMESPACE),KFP_NAMESPACE='$(NAMESPACE)') $(BIN)/d2plm pipeline submit $(PIPELINE) $(if $(filter 1 true yes,$(WAIT)),wait=true)

manifests: $(TOOLS) ## Write the jobs' manifests from k8s/job_settings.json, and set the images' names (REGISTRY= TAG=)
	$(BIN)/python -c 'import json, pathlib, subprocess; \
	  [pathlib.Path("k8s", file).write_bytes(subprocess.check_output(["$(BIN)/d2plm", "job", "show", *words])) \
	   for file, words in json.load(open("k8s/job_settings.json"))["written"].items()]'
	for file in k8s/pytorchjob.yaml k8s/trainjob.yaml k8s/clustertrainingruntime.yaml k8s/job/job.yaml k8s/examples/*.yaml k8s/base/mlflow.yaml k8s/serving/deployment.yaml k8s/serving/kserve/inference_service.yaml; do \
	  sed -E 's|( image: )([^ ]*/)?d2plm-([a-z0-9]+)(:[^ ]*)?$$|\1$(call image,\3)|' $$file > $$file.new && mv $$file.new $$file || exit; \
	done

secrets: ## Create missing k8s/secrets/*.env files with random passwords
	@umask 077; for example in k8s/secrets/*.env.example; do \
	  file=$${example%.example}; test -e $$file || $(PYTHON) -c 'import re, secrets, sys; print(re.sub("RANDOM", lambda _: secrets.token_hex(24), open(sys.argv[1]).read()), end="")' $$example > $$file; \
	done
	@echo 'now: kubectl apply -k k8s/secrets'

kind-up: ## Create a kind cluster with the training operators and the images (after make images)
	$(KIND) version | grep -q '$(KIND_VERSION)' || { echo 'kind-up needs kind $(KIND_VERSION), to which KUBERNETES_IMAGE belongs' >&2; exit 1; }
	$(KIND) get clusters | grep -qx '$(CLUSTER)' || $(KIND) create cluster --name $(CLUSTER) --image $(KUBERNETES_IMAGE) --config k8s/kind/cluster.yaml --wait 180s
	archive=$$(mktemp) && trap 'rm -f "$$archive"' EXIT && for name in trainer mmseqs2 mlflow; do \
	  image=docker.io/library/d2plm-$$name:$(VERSION); \
	  $(CONTAINER_ENGINE) tag d2plm-$$name:$(VERSION) $$image && rm -f "$$archive" && \
	  $(CONTAINER_ENGINE) save --output "$$archive" $$image && \
	  $(KIND) load image-archive --name $(CLUSTER) "$$archive" || exit; \
	done
	$(KIND_CONTEXT) apply --server-side -k 'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=$(TRAINING_OPERATOR_VERSION)'
	$(KIND_CONTEXT) apply --server-side -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=$(TRAINER_VERSION)'
	$(KIND_CONTEXT) --namespace kubeflow rollout status deployment/training-operator --timeout=300s
	$(KIND_CONTEXT) --namespace kubeflow-system wait --for=condition=Available deployment --all --timeout=300s
	$(KIND_CONTEXT) apply --server-side -k k8s/overlays/kind

kind-smoke: ## Run the pipeline's steps and a job that loses a worker on the kind cluster
	k8s/kind/smoke.sh kind-$(CLUSTER)

kind-down: ## Delete the kind cluster
	$(KIND) delete cluster --name $(CLUSTER)

images: image-trainer image-mmseqs2 image-mlflow ## Build the images (CONTAINER_ENGINE=docker|podman REGISTRY= TAG= VARIANT=cpu|cuda)

TORCH_INDEX_cpu := https://download.pytorch.org/whl/cpu
# PyPI has the build for CUDA 13.0.
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

check-images: check-trainer check-mmseqs2 check-mlflow check-pipeline ## Run the images as pods do: as any user, with only /tmp writable

check-pipeline: CHECKED = trainer
check-trainer check-mmseqs2 check-mlflow check-pipeline: check-%:
	$(CONTAINER_ENGINE) run --rm --interactive --read-only --user 12345:12345 \
		--tmpfs /tmp:mode=1777 --shm-size 1g --cap-drop ALL --security-opt no-new-privileges \
		--entrypoint sh $(call image,$(or $(CHECKED),$*)) -s < docker/smoke/$*.sh

dist: ## Build the wheel and the source archive into dist/, and check their metadata
	rm -rf dist .dist-venv && $(PYTHON) -m venv .dist-venv
	.dist-venv/bin/pip install --quiet --constraint requirements.lock hatchling twine==7.0.0
	.dist-venv/bin/python -m hatchling build --target sdist
	mkdir .dist-venv/source && tar -xzf dist/*.tar.gz --strip-components=1 -C .dist-venv/source
	cd .dist-venv/source && ../bin/python -m hatchling build --target wheel --directory ../../dist
	.dist-venv/bin/twine check --strict dist/*
	rm -rf .dist-venv

check-wheel: dist ## Install only the wheel in a new environment outside the clone, and test it
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" \
	  && "$$folder/bin/pip" install --quiet --constraint requirements.lock "d2plm[demo] @ file://$$(ls "$$PWD"/dist/*.whl)" \
	  && tests/wheel.sh "$$folder/bin"

lock: ## Write requirements.lock from pyproject.toml (needs the package index)
	rm -rf .lock-venv && $(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet 'torch==2.13.0' hatchling editables '.[pipelines,system-metrics,tracking-server,tensorboard,wandb,dev]'
	.lock-venv/bin/pip freeze --exclude d2plm | sed 's/+cpu$$//' > requirements.lock
	rm -rf .lock-venv

clean: ## Remove the environment and all runs
	rm -rf $(VENV) runs
