#!/usr/bin/env bash
# Run the pipeline's steps as pods, and a training job that loses a worker, on the kind cluster created by
# `make kind-up` (make kind-smoke). This needs a container engine, kind and kubectl, so it runs in
# .github/workflows/kind.yml and on machines that have them.
#
# Usage: k8s/kind/smoke.sh [CONTEXT]    kubectl's context; default kind-d2plm
# On failure it describes all objects and prints all logs, or writes them to a folder with
# DIAGNOSTICS=FOLDER. With KFP_HOST, a Kubeflow Pipelines server with the objects of
# overlays/kubeflow-profile in its steps' namespace, it also runs a sweep there.
set -euo pipefail
cd "$(dirname "$0")"

readonly CONTEXT=${1:-kind-d2plm}
readonly JOB=d2plm
readonly CHECKPOINTS=/workspace/job/diffusion/checkpoints

[[ $CONTEXT == kind-* ]] || { echo "$CONTEXT: the smoke test runs only on kind clusters" >&2; exit 2; }

k() { kubectl --context "$CONTEXT" --namespace d2plm "$@"; }

say() { printf '\n── %s ──\n' "$*"; }

diagnose() {
  say "what there is"
  k get all,persistentvolumeclaims,pytorchjobs,trainjobs --output wide
  say "events"
  k get events --sort-by .lastTimestamp
  say "descriptions"
  k describe pods,jobs,pytorchjobs,trainjobs,persistentvolumeclaims
  say "the training operator"
  kubectl --context "$CONTEXT" --namespace kubeflow logs deployment/training-operator --tail 200
  for pod in $(k get pods --output name); do
    say "log of $pod"
    k logs "$pod" --all-containers --prefix --tail 500
    k logs "$pod" --all-containers --prefix --tail 500 --previous 2>/dev/null
  done
}

on_exit() {
  local status=$?
  ((status == 0)) && return
  set +e
  say "failed with exit code $status"
  if [[ -n ${DIAGNOSTICS:-} ]]; then
    mkdir -p "$DIAGNOSTICS"
    diagnose >"$DIAGNOSTICS/smoke.log" 2>&1
    say "everything else is in $DIAGNOSTICS/smoke.log"
  else
    diagnose
  fi
}
trap on_exit EXIT

# Return as soon as the object fails, instead of at the timeout.
await() { # OBJECT CONDITION SECONDS
  local object=$1 condition=$2 seconds=$3 deadline
  deadline=$((SECONDS + seconds))
  until k wait --for="condition=$condition" "$object" --timeout=5s >/dev/null 2>&1; do
    if k wait --for=condition=Failed "$object" --timeout=1s >/dev/null 2>&1; then
      echo "$object failed" >&2
      return 1
    elif ((SECONDS > deadline)); then
      echo "$object was not $condition after $seconds seconds" >&2
      return 1
    fi
  done
}

step() { # NAME
  say "$1"
  k apply --selector "step=$1" --filename steps.yaml
  await "job/$1" Complete 900
  k logs "job/$1" --tail 20
}

checkpoint_of_job() {
  k exec "$JOB-worker-0" --container pytorch -- \
    sh -c "ls -d $CHECKPOINTS/step-* 2>/dev/null | tail -n 1"
}

say "what an earlier run left goes"
k delete jobs,pytorchjobs,trainjobs,trainingruntimes --all --timeout=300s
k delete persistentvolumeclaim d2plm-workspace --ignore-not-found --timeout=300s

say "the namespace, and MLflow"
kubectl kustomize ../overlays/kind | kubectl --context "$CONTEXT" apply --server-side --filename -
k rollout status deployment/mlflow --timeout=300s

for name in prepare train train-v2 evaluate register generate; do
  step "$name"
done

say "embeddings in eight shards, one of which loses its pod"
readonly SHARDS=batch.kubernetes.io/job-name=d2plm-embed
sed 's#/workspace/demo#/workspace/smoke#; s#residues=1022#residues=126#; s#parallelism: 8#parallelism: 2#
  s#memory: 4Gi#memory: 1Gi#; s#cpu: .*#cpu: 250m#; s#sizeLimit: 1Gi#sizeLimit: 64Mi#' \
  ../examples/embed_job.yaml | k apply --filename -
deadline=$((SECONDS + 300))
until pod=$(k get pods --selector "$SHARDS" --field-selector status.phase=Running --output name | head -n 1) &&
  [[ -n $pod ]]; do
  ((SECONDS < deadline)) || { echo "no shard has started" >&2; exit 1; }
  sleep 1
done
k delete "$pod" --wait=false
await job/d2plm-embed Complete 900
logs=$(k logs --selector "$SHARDS" --prefix --tail=-1)
grep 'joined 8 shards' <<<"$logs" || { echo "the shards were not joined" >&2; exit 1; }

say "a job of two workers"
kubectl kustomize --load-restrictor=LoadRestrictionsNone job |
  kubectl --context "$CONTEXT" apply --server-side --filename -
await "pytorchjob/$JOB" Running 300
for worker in 0 1; do
  k wait --for=condition=Ready "pod/$JOB-worker-$worker" --timeout=300s
done

say "until its first checkpoint"
deadline=$((SECONDS + 300))
until [[ -n $(checkpoint_of_job) ]]; do
  ((SECONDS < deadline)) || { echo "there is no checkpoint after five minutes" >&2; exit 1; }
  sleep 2
done

say "without worker 1"
before=$(k get pod "$JOB-worker-1" --output jsonpath='{.metadata.uid}')
k delete pod "$JOB-worker-1" --wait=true --timeout=240s
until after=$(k get pod "$JOB-worker-1" --output jsonpath='{.metadata.uid}' 2>/dev/null) &&
  [[ $after != "$before" ]]; do
  ((SECONDS < deadline + 300)) || { echo "worker 1 did not come back" >&2; exit 1; }
  sleep 2
done
await "pytorchjob/$JOB" Succeeded 900
logs=$(k logs --selector "training.kubeflow.org/job-name=$JOB" --container pytorch --prefix --tail=-1)
tail -n 40 <<<"$logs"
grep 'resumed (.*/step-' <<<"$logs" || { echo "the job did not resume from a checkpoint" >&2; exit 1; }

if [[ -n ${KFP_HOST:-} ]]; then
  say "a sweep of four runs, then its table from the finished runs"
  for _ in 1 2; do
    d2plm pipeline submit sweep=compare experiment=debug parallel=2 'seeds=[1,2]' \
      'arms={short: {}, long: {trainer: {max_steps: 20}}}' work_dir=/workspace/sweep \
      data.input=/opt/d2plm/examples/data/uniprot_500.fasta.gz launcher.cpu=250m launcher.memory=2Gi \
      launcher.shared_memory=256Mi prepare_memory=2Gi wait=true
  done
fi

say "all is well"
