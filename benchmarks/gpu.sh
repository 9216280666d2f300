#!/bin/sh
# Measures training on one NVIDIA GPU in under ten minutes: the machine; matrix products and copies
# at the model's shapes; the step's MFU at 450 M and 150 M parameters over several budgets, with its
# variants, forced synchronisations, recompilations, kernels, and memory against the forecast;
# attention; trainers that pad. Stages run one after another, the most informative first, each with
# a time limit; a failed stage does not affect the others.
#
#   benchmarks/gpu.sh                             # writes gpu/*.json and gpu/*.log
#   OUTPUT=h200 ONLY='step attention' benchmarks/gpu.sh
#   DEVICE=cpu QUICK=1 benchmarks/gpu.sh          # only tries the scripts, in a few minutes
#
# Needs a checkout of the repository, Python 3.11 or newer and a CUDA build of torch 2.11 or newer.
# Other packages that the trainer imports are installed if they are missing: from the package index,
# or, without a network, from a folder of wheels:
#
#   pip download --no-deps -d wheels lmdb diffusers importlib_metadata einops   # elsewhere
#   WHEELS=wheels benchmarks/gpu.sh
#
# PYTHON chooses the interpreter. No setting of the GPU is changed. Use an otherwise idle machine.
set -eu

PYTHON=${PYTHON:-python3}
repository=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$PYTHON" - <<'CHECK' || exit 1
import sys

if sys.version_info < (3, 11):
    sys.exit(f"gpu.sh needs Python 3.11 or newer, and this is {sys.version.split()[0]}: set PYTHON")
try:
    import torch
except ImportError:
    sys.exit("gpu.sh: torch is missing: install a CUDA build of it, 2.11 or newer")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    sys.exit(f"gpu.sh needs torch 2.11 or newer, and this is {torch.__version__}")
CHECK

missing=$("$PYTHON" - <<'MISSING'
from importlib.util import find_spec

packages = {
    "numpy": "numpy",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "importlib_metadata": "importlib_metadata",  # this and the next two are diffusers'
    "PIL": "Pillow",
    "requests": "requests",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "einops": "einops",
    "lmdb": "lmdb",
    "fsspec": "fsspec",
    "yaml": "pyyaml",
}
print(*(package for module, package in packages.items() if find_spec(module) is None))
MISSING
)
if [ -n "$missing" ]; then
  echo "gpu.sh: installing $missing" >&2
  # shellcheck disable=SC2086  # several words
  if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" $missing
  else
    "$PYTHON" -m pip install --quiet $missing
  fi
fi

if ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
  echo "gpu.sh: there is no C compiler, so torch.compile cannot work and the step runs uncompiled" >&2
fi

OUTPUT=${OUTPUT:-gpu} DEVICE=${DEVICE:-cuda} ONLY=${ONLY:-}
mkdir -p "$OUTPUT"
began=$(date +%s)
measured=0

# stage NAME SECONDS SCRIPT ARGUMENTS...: run a script if ONLY selects it and time is left.
stage() {
  name=$1 seconds=$2 script=$3
  shift 3
  for word in ${ONLY:-$name}; do case $name in *"$word"*) ;; *) continue ;; esac
    left=$((560 - $(date +%s) + began))
    if [ "$left" -lt 20 ]; then echo "$name: skipped, $left s are left"; return 0; fi
    [ "$left" -lt "$seconds" ] && seconds=$left
    echo "== $name"
    if timeout --kill-after=5 "$seconds" "$PYTHON" -m "benchmarks.$script" --device "$DEVICE" \
      --output "$OUTPUT/$name.json" "$@" 2>"$OUTPUT/$name.log"; then
      measured=$((measured + 1))
    else
      echo "$name failed with code $? (124: time limit of $seconds s): see $OUTPUT/$name.log"
    fi
    return 0
  done
}

nvidia-smi -q >"$OUTPUT/nvidia-smi.txt" 2>&1 || echo "nvidia-smi failed: see $OUTPUT/nvidia-smi.txt"
if [ -n "${QUICK:-}" ]; then
  tiny='--model nano --max-length 256 --no-compile'
  # shellcheck disable=SC2086  # several words
  {
    stage ceiling 60 ceiling --model nano --tokens 256 --square 128 --copied-bytes 1000000
    stage step 120 step $tiny --token-budget 1024 --steady-steps 3 --turns 2 --steps 1
    stage attention 120 attention --token-budget 1024 --max-length 256 --turns 2 --steps 1
    stage peers 240 peers $tiny --token-budget 1024 --turns 1
  }
else
  step='--max-length 1024 --micro-batches 0'
  alone="$step --turns 0 --profiled-steps 0"
  # shellcheck disable=SC2086
  {
    stage ceiling 45 ceiling --model 450m --tokens 65536
    stage step-450m-65536 230 step $step --model 450m --token-budget 65536 --turns 12 --steps 2
    stage attention 70 attention --heads 16 --token-budget 65536
    stage step-150m-65536 90 step $alone --model 150m --token-budget 65536
    stage step-450m-131072 120 step $alone --model 450m --token-budget 131072
    stage step-450m-32768 80 step $alone --model 450m --token-budget 32768
    stage step-150m-32768 80 step $alone --model 150m --token-budget 32768
    stage step-150m-131072 90 step $alone --model 150m --token-budget 131072
    # All arms are in memory at once; those that pad to 1,024 have 2.5 positions per token. 8,192
    # tokens take more than an H200's 140 GiB.
    stage peers-150m 240 peers --model 150m --token-budget "${PEERS_TOKENS:-2048}" --turns 6
  }
fi
[ "$measured" -gt 0 ] || { echo 'no stage succeeded, see above'; exit 1; }
