#!/bin/sh
# Test the mmseqs2 image: KFP's executor runs the pipeline's preparation of 500 proteins, without torch.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HOME="$scratch" TMPDIR="$scratch"
cd "$scratch"

test "$(python3 -c 'import importlib.util as u; print(u.find_spec("torch"))')" = None
cat > component.py <<'PYTHON'
import kfp
from kfp import dsl
from kfp.dsl import *


def prepare(work_dir: str, input: str, overrides: str) -> str:
    from pipelines import steps

    return steps.prepare(steps.configure("smoke", "", work_dir, "none", overrides, input=input))
PYTHON
input=/opt/d2plm/examples/data/uniprot_500.fasta.gz
_KFP_RUNTIME=true python3 -m kfp.dsl.executor_main \
    --component_module_path component.py --function_to_execute prepare --executor_input "{
      \"inputs\": {\"parameterValues\": {
        \"work_dir\": \"work\", \"input\": \"$input\",
        \"overrides\": \"experiment=debug tracking=none\"}},
      \"outputs\": {
        \"parameters\": {\"Output\": {\"outputFile\": \"$scratch/digest\"}},
        \"outputFile\": \"$scratch/output.json\"}}"
grep -Eq '"Output": "[0-9a-f]{64}"' output.json
