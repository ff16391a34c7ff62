#!/usr/bin/env bash
# Builds the image of the Dockerfile as engram-server:test and runs tests/image on it; options go to pytest. No image
# registry is asked: the base image is made by debootstrap, from the Debian mirror that this machine's apt uses, and kept in
# build/image. Needs root, and `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

((EUID == 0)) || die "debootstrap and a container engine need root: sudo make test-image. Without it, \`make wheel\` takes the" \
  "steps of the Dockerfile that need none, and \`make test\` looks at the rest of deploy/."
# In a mount namespace of its own, so that no mount is left in build/, whatever happens.
[[ -n "${ENGRAM_IN_NAMESPACE:-}" ]] ||
  ENGRAM_IN_NAMESPACE=1 exec unshare --mount --propagation private "$PWD/scripts/test_image.sh" "$@"
scripts/setup_system.sh --image
trap 'scripts/podman.sh rm --all --force >/dev/null 2>&1' EXIT

suite=bookworm # of the Dockerfile
folder=build/image
mkdir -p "$folder"

make_base() {
  local mirror tree="$folder/tree"
  mirror="$(apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' 2>/dev/null |
    awk -v suite="$suite" '$1 == "Debian" && $2 == suite && !found++ { print $3 }')"
  rm -rf "$tree"
  debootstrap --variant=minbase "$suite" "$tree" ${mirror:+"$mirror"} || return
  # How this machine's apt reaches its mirror: by proxies, by what clock.
  apt-config dump | grep -E '^Acquire::(https?|Check|Retries)' >"$tree/etc/apt/apt.conf.d/90machine" || true
  rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
  tar --create --directory "$tree" --file "$folder/base.new" . && mv "$folder/base.new" "$folder/base.tar"
  rm -rf "$tree"
}

# logged TEXT COMMAND...: run quietly; the whole log only when it fails.
logged() {
  local text="$1" log="$folder/log" start=$SECONDS
  shift
  printf 'image: %s ... ' "$text"
  "$@" >"$log" 2>&1 || { echo failed; cat "$log" >&2; die "this failed: $text (log above, and in $log)"; }
  echo "$((SECONDS - start)) s"
}

[[ -f "$folder/base.tar" ]] || logged "a Debian $suite by debootstrap" make_base
scripts/podman.sh image exists debian:bookworm-slim ||
  logged "importing it" scripts/podman.sh import "$folder/base.tar" debian:bookworm-slim

# How this machine's pip reaches its index goes along for the build, and stays out of the image.
mapfile -t mounts < <(.venv/bin/python -m pip config list | .venv/bin/python scripts/pip_mounts.py "$folder/pip.conf")
logged "building it (minutes, at first)" \
  scripts/podman.sh build --format docker --network host "${mounts[@]}" --tag engram-server:test .
logged "one with systemd, for the unit" \
  scripts/podman.sh build --format docker --network host --file tests/image/systemd.Dockerfile \
  --tag engram-server:systemd deploy/systemd
scripts/podman.sh image prune --force --filter until=24h >/dev/null # of older builds

.venv/bin/python -m pytest tests/image "$@"
