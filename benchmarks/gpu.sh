#!/bin/sh
# Measures training on one NVIDIA GPU, in one call of under ten minutes, and writes one JSON file:
# the ceiling of matrix products and copies at the model's shapes; the step's MFU at 450 M and 150 M
# parameters over several budgets; EMA, prefetch and real data against none; forced
# synchronisations; recompilations; memory against its forecast; a profile of kernels; attention;
# and trainers that pad.
#
#   benchmarks/gpu.sh                             # writes gpu.json
#   benchmarks/gpu.sh --output results/h200.json --only step attention
#   benchmarks/gpu.sh --device cpu --quick        # tries the script itself, in a minute
#
# Needs a checkout of the repository, Python 3.11 or newer and a CUDA build of torch 2.11 or newer.
# What else the trainer imports is installed where it is missing: from the package index, or, where
# there is no network, from a folder of wheels:
#
#   pip download --no-deps -d wheels lmdb diffusers importlib_metadata einops   # elsewhere
#   WHEELS=wheels benchmarks/gpu.sh
#
# PYTHON chooses the interpreter. Nothing is set on the GPU. Use a machine where nothing else runs.
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
    "importlib_metadata": "importlib_metadata",
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
  echo "gpu.sh: no C compiler here: torch.compile cannot work, and the step runs uncompiled" >&2
fi

exec "$PYTHON" -m d2plm.bench.gpu "$@"
