#!/usr/bin/env bash
# Builds the C++ tests and runs them: test_native.sh [address|thread]. With a sanitizer the native core is built again
# with it, in a folder of its own; under `address` the Python tests of the core run on that build too. Needs `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

sanitizer="${1:-}"
case "$sanitizer" in
  "") options=(-DCMAKE_BUILD_TYPE=Release -DENGRAM_PYTHON=OFF -DENGRAM_WERROR=ON) ;;
  # No -Werror: instrumented code makes GCC warn of what it cannot follow any more.
  address) options=(-DCMAKE_BUILD_TYPE=Debug -DENGRAM_PYTHON=ON) ;;
  thread) options=(-DCMAKE_BUILD_TYPE=Debug -DENGRAM_PYTHON=OFF) ;;
  *) die "unknown sanitizer '$sanitizer'; known: address, thread, or none" ;;
esac

build="build/native${sanitizer:+-$sanitizer}"
export PATH="$PWD/.venv/bin:$PATH"
log="$build/build.log"
mkdir -p "$build"
compile() {
  cmake -S . -B "$build" -G Ninja -DENGRAM_TESTS=ON -DENGRAM_SANITIZE="$sanitizer" \
    -DPython_EXECUTABLE="$PWD/.venv/bin/python" "${options[@]}" && cmake --build "$build"
}
compile >"$log" 2>&1 || { cat "$log" >&2; die "the C++ tests did not build (log above, and in $log)"; }

# ThreadSanitizer wants memory where it has always been: without address randomisation, where that may be switched off.
fixed_layout=()
if [[ "$sanitizer" == thread ]] && setarch -R true 2>/dev/null; then fixed_layout=(setarch -R); fi
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=second_deadlock_stack=1
"${fixed_layout[@]}" ctest --test-dir "$build" --output-on-failure
[[ "$sanitizer" == address ]] || exit 0

# The interpreter of .venv without the editable install, which would find the core of `make setup`: this one's package
# comes first, also in the processes that tests start.
python="$(python -c 'import sys; print(sys._base_executable)')"
site="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
mkdir -p "$build/python/engram_kernels"
cp kernels/engram_kernels/*.py "$build/python/engram_kernels/"
cmake --install "$build" --prefix "$build/python" >>"$log"
export PYTHONPATH="$PWD/$build/python:$PWD/client:$PWD:$site"
# The C++ library too: the sanitizer looks for what throws exceptions once, at start.
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)"
export LD_PRELOAD
# Leaks are the C++ tests' to find: an interpreter ends with memory it never frees. With malloc below Python's objects, a
# byte beyond an array is seen.
export ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc
"$python" - "$build/python" <<'PY' || die "Python would test another core than the one in $build"
import pathlib, sys
from engram_kernels import _core
sys.exit(not pathlib.Path(_core.__file__).is_relative_to(pathlib.Path(sys.argv[1]).absolute()))
PY
# --capture=sys leaves the sanitizers their standard error.
"$python" -m pytest -q --capture=sys tests/test_{hash,dequant,unique,reader,engine,hits,faults,record}.py
