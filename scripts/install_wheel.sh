#!/usr/bin/env bash
# Installs the wheel in dist/ with the tokenizer, in the versions of constraints.txt, into a venv of its own at the path
# named: install_wheel.sh /opt/engram. A step of the Dockerfile.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
source "$root/scripts/common.sh"

prefix="${1:?usage: install_wheel.sh PREFIX}"
wheels=("$root"/dist/*.whl)
[[ ${#wheels[@]} == 1 && -f "${wheels[0]}" ]] || die "expected one wheel in dist/, found: ${wheels[*]}"
python="$(find_python)" || die "no Python 3.11 or newer found"
"$python" -m venv "$prefix"
"$prefix/bin/pip" --disable-pip-version-check install -qq --no-cache-dir --constraint "$root/constraints.txt" \
  "${wheels[0]}[tokenizer]"
