#!/usr/bin/env bash
# Builds the native core into kernels/engram_kernels/ of this tree, without installing: the quick loop of a
# developer who runs with PYTHONPATH=.:client:kernels. `make setup` does the whole set-up.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
cmake -S . -B build/inplace -G Ninja -DCMAKE_BUILD_TYPE="${BUILD_TYPE:-Release}" -DENGRAM_WERROR=ON \
  -DPython_EXECUTABLE="$(command -v "$python")" ${CMAKE_ARGS:-} >/dev/null
cmake --build build/inplace
cmake --install build/inplace --prefix kernels >/dev/null
