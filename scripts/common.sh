# shellcheck shell=bash
# Shared by the scripts of this folder: source it, do not run it.

# die TEXT...: say what went wrong and stop.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# find_python: print the path of the Python to use: $PYTHON if set, else the first of the usual names that is
# 3.11 or newer. Prints nothing and fails when there is none.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    # Asked to run, not only looked up: version managers leave shims for Pythons that are switched off.
    "$candidate" -c 'import sys; assert sys.version_info >= (3, 11); print(sys.executable)' 2>/dev/null && return 0
  done
  return 1
}
