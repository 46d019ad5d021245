# shellcheck shell=bash disable=SC2034
# Shared by the scripts: where the tree is, and the packages it needs. Sourced, not run.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# ccache then takes paths below the tree as relative ones, so that clones in other folders share what one has compiled.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$top} CCACHE_NOHASHDIR=1

say() { printf '%s\n' "$*" >&2; }
die() {
  say "$0: $1"
  [ $# -lt 2 ] || say "  hint: $2"
  exit 1
}

# Packages by their names in Debian 12 and Ubuntu 24.04.
build_packages="g++ cmake ninja-build ccache pkg-config git
  libdnnl-dev libtbb-dev libhwloc-dev liburing-dev libaio-dev libhwy-dev libxxhash-dev libboost-context-dev
  nlohmann-json3-dev libcli11-dev libfmt-dev libspdlog-dev libgtest-dev libbenchmark-dev"
# ... and for the tests: ranks in several processes, and SentencePiece's models.
test_packages="libopenmpi-dev openmpi-bin libsentencepiece-dev"

# need PACKAGE...: installs those that are missing.
need() {
  command -v dpkg-query >/dev/null || die "this script installs Debian packages, and dpkg is not here" \
    "install the equivalents of: $* ; then run: cmake --preset release && ninja -C build"
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local sudo=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "these packages are missing, and installing them needs root: ${missing[*]}" \
      "run as root: apt-get install ${missing[*]}"
    sudo=(sudo)
  fi
  say "installing: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${sudo[@]}" apt-get -o DPkg::Lock::Timeout=120 -qq update >/dev/null || die "apt-get update failed" "is there a network?"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -qq install --no-install-recommends "${missing[@]}" >/dev/null ||
    die "installing failed: ${missing[*]}" "try: apt-get install ${missing[*]}"
}

# configure PRESET [CMAKE OPTION...]: quiet unless it fails.
configure() {
  local log
  log=$(mktemp)
  (cd "$top" && cmake --preset "$@" >"$log" 2>&1) || { cat "$log" >&2; rm -f "$log"; die "cmake --preset $* failed"; }
  rm -f "$log"
}
