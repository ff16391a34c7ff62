#!/usr/bin/env bash
# Makes this tree ready to run: system packages, .venv with pinned dependencies, and the project installed
# editable into it with its native core. Python sources are used where they lie; a changed C++ source is rebuilt by the
# next run. Takes under a second when nothing changed. PYTHON=... chooses the interpreter of a new .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

mkdir -p build
log=build/setup.log
# One set-up at a time: two `make` in one tree would break each other's .venv.
exec 9>build/.setup.lock
flock 9

# step TEXT COMMAND...: run quietly; the whole log only when it fails.
step() {
  local text="$1" start=$SECONDS
  shift
  printf 'setup: %s ... ' "$text"
  if "$@" >"$log" 2>&1; then
    echo "$((SECONDS - start)) s"
  else
    echo "failed"
    cat "$log" >&2
    die "set-up stopped at: $text (log above, and in $log)"
  fi
}

# digest FILE...: one digest of names and contents.
digest() { sha256sum "$@" | sha256sum | cut -d ' ' -f 1; }
stamped() { [[ "$(cat ".venv/$1" 2>/dev/null)" == "$2" ]]; }

scripts/setup_system.sh
scripts/setup_prometheus.sh

if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
  python="$(find_python)" || die "no Python 3.11 or newer found"
  rm -rf .venv
  step ".venv with $("$python" --version)" "$python" -m venv .venv
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check)
install=("${pip[@]}" install --constraint constraints.txt)

tools="$(digest pyproject.toml constraints.txt)"
if ! stamped .stamp-tools "$tools"; then
  # The pip that comes with Python 3.11 knows no dependency groups.
  step "pip" "${install[@]}" --upgrade pip
  step "build and test tools" "${install[@]}" --group dev
  echo "$tools" >.venv/.stamp-tools
fi

mapfile -t sources < <(find kernels/src -type f | LC_ALL=C sort)
build="$(digest pyproject.toml constraints.txt CMakeLists.txt scripts/setup.sh "${sources[@]}")"
if ! stamped .stamp-build "$build"; then
  # No isolation: the compiler's view of the build tools must not move, or every build would start from nothing.
  step "engram-server and its dependencies (minutes, at first)" \
    "${install[@]}" --no-build-isolation --config-settings=cmake.define.ENGRAM_WERROR=ON \
    --editable '.[torch,gpu,tokenizer,load,otel]'
  echo "$build" >.venv/.stamp-build
  echo "setup: ready"
else
  echo "setup: up to date"
fi
