#!/usr/bin/env bash
# Download the resource definitions with which tests check the jobs' manifests, in the versions pinned in the Makefile:
# .github/custom_resources.sh FOLDER && D2PLM_CRD_DIR=FOLDER make test
set -euo pipefail

readonly FOLDER=$1
version() { sed -n "s/^$1 := //p" "$(dirname "$0")/../Makefile"; }

fetch() { # REPOSITORY VERSION FILE SHA256
  curl --fail --silent --show-error --location --retry 3 --output "$FOLDER/$3" \
    "https://raw.githubusercontent.com/$1/$2/manifests/base/crds/$3"
  echo "$4  $FOLDER/$3" | sha256sum --check --quiet
  gzip --force "$FOLDER/$3"
}

mkdir -p "$FOLDER"
fetch kubeflow/training-operator "$(version TRAINING_OPERATOR_VERSION)" \
  kubeflow.org_pytorchjobs.yaml \
  eb80e57a984cdc7ceefaaf3fc561e21b673c30cbb58589f2389528d2b2760d22
fetch kubeflow/trainer "$(version TRAINER_VERSION)" \
  trainer.kubeflow.org_trainjobs.yaml \
  b04c5e3f7480ea3b38e9b557cf4f5817be19dceb2f52ae580397184f9f95468f
fetch kubeflow/trainer "$(version TRAINER_VERSION)" \
  trainer.kubeflow.org_trainingruntimes.yaml \
  4dc9b8e0f6fff0bfd6b406c411774a12e39427887e51d294abdb8004f918b431
