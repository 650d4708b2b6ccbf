#!/bin/sh
# Debian's Prometheus and promtool without root: the package is downloaded and unpacked, not
# installed. Prints the folder of the two programs; those on PATH come first.
#   deploy/prometheus/fetch.sh [FOLDER]     by default in Invar's cache
set -eu

if found=$(command -v promtool) && command -v prometheus >/dev/null; then
  dirname "$found"
  exit
fi
folder=${1:-${INVAR_CACHE:-$HOME/.cache/invar}/tools/prometheus}
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
if [ ! -x "$folder/usr/bin/promtool" ]; then
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "fetch.sh: no apt here; install Prometheus and have prometheus and promtool on PATH" >&2
    exit 1
  fi
  work=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  cd "$work"
  # Package lists of its own where the system's have never been read (they need root).
  mkdir -p state/lists/partial cache/archives/partial
  own="-o Dir::State=$work/state -o Dir::Cache=$work/cache -o Debug::NoLocking=1"
  if ! apt-get -qq download prometheus 2>/dev/null; then
    # shellcheck disable=SC2086
    if ! { apt-get -qq $own update && apt-get -qq $own download prometheus; } >&2; then
      echo "fetch.sh: Debian's package prometheus cannot be downloaded: no network, or no such" \
        "package in /etc/apt/sources.list" >&2
      exit 1
    fi
  fi
  dpkg -x prometheus_*.deb unpacked
  rm -rf "$folder"
  mv unpacked "$folder"
fi
echo "$folder/usr/bin"
