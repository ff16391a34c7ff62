#!/usr/bin/env bash
# Proves the wheel in dist/ (or the one named): it installs into a clean venv without a compiler, uses the liburing it
# carries and none of the system's, and looks rows up.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
source "$root/scripts/common.sh"

wheels=("${1:-"$root"/dist/*.whl}")
[[ -f "${wheels[0]}" ]] || wheels=("$root"/dist/*.whl)
[[ ${#wheels[@]} == 1 && -f "${wheels[0]}" ]] || die "expected one wheel, found: ${wheels[*]}"
wheel="$(realpath "${wheels[0]}")"

clean="$(mktemp -d)"
trap 'rm -rf "$clean"' EXIT
cd "$clean" # not the source tree, which Python would import from
python="$(find_python)" || die "no Python 3.11 or newer found"
"$python" -m venv venv
echo "wheel: installing $(basename "$wheel") without a compiler"
CC=/bin/false CXX=/bin/false venv/bin/pip --disable-pip-version-check install -qq "$wheel"
venv/bin/pip --disable-pip-version-check check

venv/bin/python -I - <<'PY'
import importlib.metadata
import pathlib
import sys

import engram_client
import engram_kernels._core
import engram_load
import engram_server

packages = [engram_client, engram_kernels, engram_load, engram_server]
for package in packages:
    folder = pathlib.Path(package.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is outside the venv"
    assert (folder / "py.typed").exists(), f"{folder} has no py.typed"

mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/liburing" in line}
bundled = pathlib.Path(engram_server.__file__).parent.parent / "engram_server.libs"
assert mapped, "the native core does not load liburing"
for library in mapped:
    assert pathlib.Path(library).parent == bundled, f"{library} is loaded, not one in {bundled}"

files = importlib.metadata.files("engram-server")
names = {file.name for file in files}
assert {"LICENSE", "liburing.txt", "nanobind.txt"} <= names, "licence texts are missing"
assert "torch" not in sys.modules, "importing the packages imports torch"
print(f"wheel: liburing is {', '.join(pathlib.Path(library).name for library in mapped)}; {len(files)} files")
PY
# The whole of it once: write tables, open them, read rows.
venv/bin/engram-load --help >log 2>&1 || { cat log >&2; die "engram-load --help failed"; }
for command in "--help" "synth tables --engram-vocab-size 1000" "lookup tables --rows 14:0,17,-1 --output rows.npy"; do
  read -ra arguments <<<"$command"
  venv/bin/engram-server "${arguments[@]}" >log 2>&1 || { cat log >&2; die "engram-server $command failed"; }
done
venv/bin/python -I -c 'import numpy; rows = numpy.load("rows.npy"); assert rows.shape == (3, 136) and rows[:2].any(1).all() and not rows[2].any()'
echo "wheel: ok"
