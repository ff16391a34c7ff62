#!/usr/bin/env bash
# Generates client/engram_client/_proto (or the folder named) from proto/engram/v1/engram.proto. The result is
# committed: users need no protoc.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
out="${1:-client/engram_client/_proto}"
"$python" -m grpc_tools.protoc -I proto/engram/v1 --python_out="$out" --pyi_out="$out" \
  --grpc_python_out="$out" engram.proto
# protoc writes an absolute import; ours live inside a package.
sed -i 's/^import engram_pb2 as /from . import engram_pb2 as /' "$out"/engram_pb2_grpc.py
