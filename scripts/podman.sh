#!/usr/bin/env bash
# A podman for `make test-image` alone: its images and containers lie in build/image, apart from those of the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build/image
# A machine that is a guest itself may raise no limits, which the defaults would.
printf '[containers]\ndefault_ulimits = ["nofile=%s:%s", "nproc=4096:4096"]\n' 4096 4096 >build/image/containers.conf
export CONTAINERS_CONF="$PWD/build/image/containers.conf"
# podman takes no long path for its sockets.
exec podman --root "$PWD/build/image/storage" --runroot "/run/engram-image-$(cksum <<<"$PWD" | cut -d ' ' -f 1)" \
  --storage-driver "${STORAGE_DRIVER:-overlay}" --runtime runc --cgroup-manager cgroupfs --events-backend file "$@"
