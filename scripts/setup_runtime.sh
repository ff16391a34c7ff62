#!/usr/bin/env bash
# Readies a Debian system to run what install_wheel.sh made: Python, and the user and folders of the server. A step of
# the Dockerfile; needs root.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends python3 >/dev/null
rm -rf /var/lib/apt/lists/*

# Numbers, which Kubernetes wants to see that this is not root, and which volumes are to be owned by.
groupadd --gid 10001 engram
useradd --uid 10001 --gid engram --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin engram
# Sockets, which engines may enter and find; hot sets and traces.
install -d -o engram -g engram -m 0755 /run/engram
install -d -o engram -g engram -m 0750 /var/lib/engram
