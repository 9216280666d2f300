#!/bin/sh
# Test the trainer image: the command line, KFP's executor, and a training step of a nano model.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HOME="$scratch" TMPDIR="$scratch"
cd "$scratch"

d2plm --help > help.txt
mlflow --version
_KFP_RUNTIME=true python3 -m kfp.dsl.executor_main --help > executor.txt
python3 - <<'PYTHON'
import kfp, kubernetes, mlflow, tensorboard, torch, wandb
from d2plm.core.batch import PackedBatch
from d2plm.launch import elastic
from d2plm.model.dit_config import DiTConfig
from d2plm.model.dit import DiT

model = DiT(DiTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64))
tokens = torch.randint(4, 24, (16,), dtype=torch.uint8)
logits = model(tokens, torch.tensor([0, 10, 16], dtype=torch.int32), 10, torch.tensor([0.3, 0.7]))
logits.sum().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
print("torch", torch.__version__, "kfp", kfp.__version__)
PYTHON
