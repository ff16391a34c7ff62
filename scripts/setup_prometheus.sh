#!/usr/bin/env bash
# Sees to promtool and prometheus, which the tests of deploy/prometheus run: those on PATH, if both are; else those of
# Debian's package, unpacked into build/tools and not installed, since an installed one starts a daemon. Does nothing,
# quickly, when they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

tools=build/tools
programs=(prometheus promtool)

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
if [[ -x "$tools/prometheus" && -x "$tools/promtool" ]]; then exit 0; fi

if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  die "missing: ${programs[*]}. This script takes them out of Debian's package only; please put both on PATH, or into" \
    "$tools (Arch: prometheus; elsewhere https://prometheus.io/download) and run it again."
fi

mkdir -p build
unpacked="$(mktemp -d build/tools.XXXXXX)"
trap 'rm -rf "$unpacked"' EXIT
chmod 755 "$unpacked" # root's apt downloads as a user of its own
log="$unpacked/log"
fetch() { (cd "$unpacked" && apt-get -qq download prometheus) >>"$log" 2>&1; }
refresh() {
  local sudo=()
  ((EUID == 0)) || sudo=(sudo -n)
  "${sudo[@]}" apt-get -qq -o DPkg::Lock::Timeout=300 update >>"$log" 2>&1
}

echo "setup: unpacking prometheus into $tools"
# Lists of packages that are missing or old are what it fails for; only renewing them needs root.
if ! fetch && ! { refresh; fetch; }; then
  cat "$log" >&2
  die "apt-get could not download the package prometheus (its output is above). Put prometheus and promtool on PATH," \
    "or into $tools, by hand."
fi
dpkg-deb --fsys-tarfile "$unpacked"/prometheus_*.deb | tar -x -C "$unpacked" ./usr/bin
mkdir -p "$tools"
for program in "${programs[@]}"; do
  "$unpacked/usr/bin/$program" --version >/dev/null || die "$program of the package does not run here (see above)."
  mv "$unpacked/usr/bin/$program" "$tools/$program"
done
