#!/usr/bin/env bash
# Makes or completes the development environment: Debian packages where that is allowed, then .venv.
# Each step leaves a stamp named after what it installed, so a second run does nothing and needs no
# network. PYTHON names the interpreter to use (default: python3.11, else python3).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
here="$root/python/environment"
venv="$root/.venv"
lock="$here/lock.txt"
debian_list="$here/debian.txt"

say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
hash_of() { cat "$@" | sha256sum | cut -c 1-16; }

# Prints the packages of debian.txt that are not installed.
missing_debian_packages() {
  local package
  while read -r package; do
    case "$package" in '' | '#'*) continue ;; esac
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
      printf '%s ' "$package"
  done <"$debian_list"
}

install_debian_packages() {
  command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || return 0
  local missing become_root=""
  missing="$(missing_debian_packages)"
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      say "Debian packages not installed (not root): $missing"
      return 0
    fi
    become_root="sudo"
  fi
  say "Debian packages: $missing"
  # All of them are optional: CMake downloads GoogleTest where it is not installed.
  # shellcheck disable=SC2086  # a list of words
  { $become_root apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive $become_root apt-get install -y -qq --no-install-recommends \
      $missing >/dev/null; } || say "apt-get failed; going on without: $missing"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  fail "the locked environment needs CPython 3.11; name one with PYTHON=/path/to/python3.11"
}

# One line per package instead of pip's several, and no word of an index configured on this machine
# that lacks one of them. Arguments: those of pip install.
pip_install() {
  "$venv/bin/python" -m pip install --no-input --no-compile --progress-bar off "$@" \
    2> >(grep -v '^WARNING: Location .* is ignored' >&2) |
    awk 'function show(name) { sub(".*/", "", name); printf "    [%3d] %s\n", ++n, name; fflush() }
         /^(Collecting|Processing) / { show($2) }
         /^Requirement already satisfied:/ { show($4) }
         /^Installing collected/ { print "    unpacking"; fflush() }'
}

install_python_packages() {
  local stamp
  stamp="$venv/.phasekv-environment-$(hash_of "$lock" "${BASH_SOURCE[0]}")"
  [ ! -e "$stamp" ] || return 0
  if [ ! -x "$venv/bin/python" ]; then
    say "Virtual environment in .venv"
    "$(find_python)" -m venv "$venv"
  fi
  say "Python packages: $(grep -c -v '^#' "$lock") locked ones, a few minutes the first time"
  pip_install --no-deps -r "$lock"
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # A CUDA build of torch, which needs NVIDIA's libraries from packages of their own.
    say "Python packages: what this build of torch needs"
    pip_install "$(grep '^torch==' "$lock")"
    "$venv/bin/python" -c 'import torch' || fail "torch was installed but cannot be imported"
  fi
  rm -f "$venv"/.phasekv-environment-*
  touch "$stamp"
}

command -v c++ >/dev/null || fail "no C++ compiler: install g++ 12 or newer, or clang 16 or newer"
install_debian_packages
install_python_packages
say "Environment ready: .venv"
