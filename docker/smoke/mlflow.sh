#!/bin/sh
# Test the MLflow image: the drivers are installed, and a server with a fresh store responds.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export HOME="$scratch" TMPDIR="$scratch"
cd "$scratch"

python3 -c 'import boto3, flask_wtf, psycopg2'
mlflow server --host 127.0.0.1 --port 5000 --workers 1 \
    --backend-store-uri "sqlite:///$scratch/mlflow.db" --artifacts-destination "$scratch" &
server=$!
trap 'kill $server; wait $server || true; rm -rf "$scratch"' EXIT
python3 - <<'PYTHON'
import time
import urllib.request

deadline = time.monotonic() + 180
while True:
    try:
        with urllib.request.urlopen("http://127.0.0.1:5000/health", timeout=5) as answer:
            assert answer.status == 200
            break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(1)
PYTHON
