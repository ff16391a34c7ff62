#!/usr/bin/env bash
# Sees to the system packages of a build: a C++ compiler, pkg-config, liburing, Python 3.11+ with venv and headers; and,
# unless called with --runtime, to what tests and benchmarks need: fio to measure against, FUSE to break reads with, doctest
# for tests in C++, systemd's analyser for the unit in deploy/; called with --image, to what `make test-image` builds and runs the image with, alone. Missing ones are installed through apt, with sudo when not root; on a system without apt it says what
# to install. Does nothing, quickly, when nothing is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

liburing_min=2.3
what="${1:---tests}"

has_header() { c++ -x c++ -E - <<<"#if !__has_include(<$1>)"$'\n#error\n#endif' >/dev/null 2>&1; }

# Prints one line for each thing that is missing: "what it is: apt package...".
missing() {
  if [[ "$what" == --image ]]; then
    command -v debootstrap >/dev/null || echo "debootstrap: debootstrap"
    command -v podman >/dev/null || echo "podman: podman conmon"
    command -v runc >/dev/null || echo "runc: runc"
    return
  fi
  command -v c++ >/dev/null || echo "a C++ compiler: g++"
  if ! command -v pkg-config >/dev/null; then
    echo "pkg-config: pkg-config"
    echo "liburing: liburing-dev"
  elif ! pkg-config --exists "liburing >= $liburing_min"; then
    echo "liburing $liburing_min or newer with its headers: liburing-dev"
  fi
  if [[ "$what" == --tests ]]; then
    has_header doctest/doctest.h || echo "doctest: doctest-dev"
    command -v fio >/dev/null || echo "fio: fio"
    command -v fusermount3 >/dev/null || echo "FUSE: fuse3"
    command -v systemd-analyze >/dev/null || echo "systemd-analyze: systemd"
  fi
  local python version
  if ! python="$(find_python)"; then
    echo "Python 3.11 or newer: python3 python3-venv python3-dev"
    return
  fi
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  "$python" -c 'import venv, ensurepip' 2>/dev/null || echo "venv for $python: python$version-venv"
  "$python" - <<'PY' || echo "C headers for $python: python$version-dev"
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
PY
}

needs="$(missing)"
[[ -n "$needs" ]] || exit 0
names="$(sed 's/: [^:]*$//' <<<"$needs" | paste -sd ';' | sed 's/;/; /g')"

if ! command -v apt-get >/dev/null; then
  die "missing: $names. This script installs through apt only; please install them with your package manager" \
    "(Fedora: gcc-c++ pkgconf-pkg-config liburing-devel fio fuse3 doctest-devel python3-devel;" \
    "Arch: base-devel pkgconf liburing fio fuse3 doctest python) and run it again."
fi
apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
if ((EUID != 0)); then
  command -v sudo >/dev/null || die "missing: $names. Installing them needs root: run this as root, or install sudo."
  apt=(sudo env DEBIAN_FRONTEND=noninteractive "${apt[@]}")
else
  export DEBIAN_FRONTEND=noninteractive
fi

read -ra packages <<<"$(sed 's/.*: //' <<<"$needs" | paste -sd ' ')"
echo "setup: installing system packages: ${packages[*]}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
# An update that fails (one mirror of several down) need not matter: the install decides.
"${apt[@]}" update >"$log" 2>&1 || true
if ! "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
  cat "$log" >&2
  die "apt-get could not install: ${packages[*]} (its output is above)"
fi

needs="$(missing)"
[[ -z "$needs" ]] || die "still missing after apt-get installed ${packages[*]}:" \
  "$(sed 's/: [^:]*$//' <<<"$needs" | paste -sd ';' | sed 's/;/; /g')." \
  "This system's packages are too old, or \$PYTHON names an interpreter that apt does not know; install these by hand."
