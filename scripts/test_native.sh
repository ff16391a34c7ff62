#!/usr/bin/env bash
# Builds the C++ tests and runs them. Needs `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

build=build/native
export PATH="$PWD/.venv/bin:$PATH"
log="$build/build.log"
mkdir -p "$build"
compile() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DENGRAM_TESTS=ON -DENGRAM_PYTHON=OFF -DENGRAM_WERROR=ON &&
    cmake --build "$build"
}
compile >"$log" 2>&1 || { cat "$log" >&2; die "the C++ tests did not build (log above, and in $log)"; }
ctest --test-dir "$build" --output-on-failure
