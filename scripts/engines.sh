#!/usr/bin/env bash
# Puts the Python sources of the engines named in scripts/engines.txt below data/engines, once: their wheels come from
# the package index without dependencies (375 MB, kept only while they are unpacked).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

folder=data/engines
want="$(sha256sum scripts/engines.txt)"
[[ "$(cat "$folder/stamp" 2>/dev/null)" == "$want" ]] && exit 0

mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
[[ "$(cat "$folder/stamp" 2>/dev/null)" == "$want" ]] && exit 0

printf 'engines: fetching the sources of vLLM and SGLang ... '
rm -rf "$folder/wheels" "$folder/src"
# Of one platform, whatever this machine is: sources are the same on all, and hashes name one file.
.venv/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --require-hashes \
  --only-binary=:all: --python-version 3.11 --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
  --dest "$folder/wheels" --requirement scripts/engines.txt || die "the wheels of vLLM and SGLang cannot be fetched"
for wheel in "$folder"/wheels/*.whl; do
  .venv/bin/python - "$wheel" "$folder/src" <<'PYTHON'
import sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith(".py")])
PYTHON
done
rm -rf "$folder/wheels"
echo "$want" >"$folder/stamp"
echo done
