#!/usr/bin/env bash
# An installed d2plm at work in an empty folder, outside any clone: generate, score and embed with
# the shipped model, the demo at debug size, and serve its model. Argument: the folder of the environment's programs.
set -euo pipefail
programs=$(cd "$1" && pwd)
work=$(mktemp -d)
server=
end() {
    test -z "$server" || kill "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap end EXIT
cd "$work"
unset PYTHONPATH
export PATH="$programs:$PATH" MLFLOW_TRACKING_URI="sqlite:///runs/demo/mlflow.db"

python -c 'import d2plm, pathlib; assert "site-packages" in pathlib.Path(d2plm.__file__).parts'
d2plm generate relatives=examples/data/family_abc_importers.fasta.gz number=10 output=new.fasta
test "$(grep -c '^>' new.fasta)" = 10
d2plm score new.fasta output=scores.csv pseudo_log_likelihood=false
test "$(wc -l < scores.csv)" = 11
d2plm embed new.fasta output=embeddings
test -f embeddings/part-00000.parquet

small="model.hidden_size=32 model.num_hidden_layers=2 model.num_attention_heads=2
    model.intermediate_size=64 model.time_embedding_dim=32 model.relatives_dim=32"
few="trainer.max_steps=10 callbacks.checkpoint.every=5 callbacks.evaluation.every=5
    callbacks.evaluation.sequences=16 evaluation.masks_per_sequence=1
    evaluation.relatives_proteins=16 generation.number=2 generation.steps=8"
# shellcheck disable=SC2086  # words
d2plm demo data.input=examples/data/uniprot_500.fasta.gz data.max_length=128 $small $few
test -f runs/demo/report.html

mkdir -p configs/experiment
printf '# @package _global_\ndefaults: [demo]\nname: mine\n' > configs/experiment/mine.yaml
d2plm train experiment=mine --cfg | grep -x 'name: mine'

d2plm generate model_dir=runs/demo/model number=2 length=40 steps=8 output=two.fasta

port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
d2plm serve models:/d2plm-diffusion@champion port="$port" > server.log 2>&1 &
server=$!
for _ in $(seq 180); do
    curl --silent --fail --output /dev/null "http://127.0.0.1:$port/ping" && break
    kill -0 "$server" 2>/dev/null || break
    sleep 1
done
curl --silent --show-error --fail "http://127.0.0.1:$port/invocations" -H 'Content-Type: application/json' \
    -d '{"inputs": {"sequence": ["MKTAYIAKQRQISFVKSHFSRQ"]}}' > answer.json || { cat server.log; exit 1; }
grep -q '"nats"' answer.json
echo "the wheel in $programs: demo, generate, score, embed, serve: passed"
