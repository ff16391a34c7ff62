#!/usr/bin/env bash
# A page as a picture: scripts/screenshot.sh report.html docs/images/load-report.png [WIDTHxHEIGHT] [light|dark]
# Needs Chromium (Debian: apt-get install chromium), which set-up does not install.
set -euo pipefail

page=$(realpath "$1") picture=$(realpath -m "$2") size=${3:-1040x1400} scheme=${4:-light}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo "screenshot.sh: there is no Chromium here: apt-get install chromium" >&2
  exit 1
}
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
mkdir -p "$(dirname "$picture")"
options=(--headless --disable-gpu --hide-scrollbars --user-data-dir="$profile" --window-size="${size/x/,}")
[[ $(id -u) != 0 ]] || options+=(--no-sandbox)
[[ $scheme != dark ]] || options+=(--blink-settings=preferredColorScheme=0)
"$browser" "${options[@]}" --screenshot="$picture" "file://$page" 2>/dev/null
echo "$picture: $(stat -c %s "$picture") bytes"
