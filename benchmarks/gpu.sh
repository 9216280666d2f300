#!/bin/sh
# Measures training on one NVIDIA GPU in under ten minutes: the step at 450 M and 150 M
# parameters, with its variants, forced synchronisations, recompilations, and memory against the
# forecast; trainers that pad. Stages run one after another, each with a time limit; a failed stage
# does not affect the others.
#
#   benchmarks/gpu.sh                             # writes gpu/*.json, gpu/*.txt and gpu/*.log
#   OUTPUT=h200 ONLY='step-150m peers' benchmarks/gpu.sh
#
# Needs a C compiler, a CUDA build of torch 2.11 or newer, and `pip install -e .`, or at least numpy,
# transformers, diffusers, accelerate, safetensors, einops, lmdb and pyyaml. PYTHON chooses the
# interpreter. No setting of the GPU is changed. Use an otherwise idle machine.
set -eu

PYTHON=${PYTHON:-python3} OUTPUT=${OUTPUT:-gpu} ONLY=${ONLY:-}
repository=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUTPUT"

# stage NAME SECONDS SCRIPT ARGUMENTS...: run a script if ONLY selects it.
stage() {
  name=$1 seconds=$2 script=$3
  shift 3
  for word in ${ONLY:-$name}; do
    case $name in *"$word"*) ;; *) continue ;; esac
    echo "== $name"
    timeout --kill-after=5 "$seconds" "$PYTHON" -m "benchmarks.$script" --device cuda "$@" \
      --output "$OUTPUT/$name.json" >"$OUTPUT/$name.txt" 2>"$OUTPUT/$name.log" ||
      echo "$name failed with code $? (124: time limit of $seconds s): see $OUTPUT/$name.log"
    cat "$OUTPUT/$name.txt"
    return 0
  done
}

nvidia-smi -q >"$OUTPUT/nvidia-smi.txt" 2>&1 || echo "nvidia-smi failed: see $OUTPUT/nvidia-smi.txt"
# 65,536 tokens of the 450M model take more than 80 GiB.
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
tokens=$((memory > 100000 ? 65536 : 32768))
stage step-450m 230 step --model 450m --token-budget "$tokens" --max-length 1024 --turns 12 --steps 2
stage step-150m 90 step --model 150m --token-budget 65536 --max-length 1024 --turns 0
# All arms are in memory at once; those that pad to 1,024 have 2.5 positions per token. 8,192 tokens
# take more than an H200's 140 GiB.
stage peers 240 peers --model 150m --token-budget 2048 --turns 6
