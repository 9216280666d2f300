#!/bin/sh
# Test the trainer image: run the whole pipeline at debug size, then two ranks with torchrun.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

proteins=${PROTEINS:-/opt/d2plm/examples/data/uniprot_500.fasta.gz}
set -- experiment=debug "work_dir=$work" "data.input=$proteins"
d2plm pipeline run "$@"
python3 -m d2plm.launch.elastic --standalone --nproc-per-node=2 \
    -m d2plm train "$@" "data.prepared_dir=$work/data" "output_dir=$work/two_ranks" \
    trainer.global_batch_tokens=4096 tracking=none
test -f "$work/two_ranks/model/model.safetensors"
