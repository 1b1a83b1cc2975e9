#!/bin/bash
# Install what healthd needs for the demo, tests and builds, on Debian 12 and Ubuntu 22.04/24.04. A step with nothing
# missing does nothing: no apt, no network.
#   scripts/setup.sh venv           .venv with healthd and its tools, and the system packages to build it
#   scripts/setup.sh venv-runtime   .venv with healthd alone, for the demo
#   scripts/setup.sh test-packages  packages of the end-to-end tests: a real Slurm, systemd in a container, a browser, gcc
#   scripts/setup.sh interpreters   print "3.X PATH" for each Python that healthd supports and this machine has
#   scripts/setup.sh make           make itself
#   scripts/setup.sh java           a Java for Spark
#   scripts/setup.sh venv-3.X       .venv-3.X for that interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BUILD_PACKAGES=(gcc libsystemd-dev pkg-config)  # systemd-python is a source package
TEST_PACKAGES=(slurmctld slurmd slurm-client munge slurmdbd systemd-container iproute2 mmdebstrap debian-archive-keyring patchelf prometheus victoria-metrics gcc e2fsprogs mount util-linux procps groff-base logrotate rsyslog rsyslog-relp rsync zsh fish curl openssl)
# MariaDB without its service, for slurmdbd.
if [ -f /etc/os-release ] && grep -q '^VERSION_CODENAME=jammy' /etc/os-release; then
  TEST_PACKAGES+=(mariadb-server-core-10.6 mariadb-client-core-10.6)
else TEST_PACKAGES+=(mariadb-server-core mariadb-client-core); fi
# The browser that opens the report. Ubuntu has it only as a snap, which apt cannot install.
if [ -f /etc/os-release ] && grep -q '^ID=debian' /etc/os-release; then TEST_PACKAGES+=(chromium); fi
DAEMONS=(slurmctld slurmd slurmdbd munge prometheus victoria-metrics rsyslog rsync)
# Versions for pip, and for the build environments that pip creates: newer pips read the second variable. Relative paths,
# because pip splits a path at spaces.
export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

need() { # PACKAGE...: install those that are missing
  local missing=() package
  if ! command -v dpkg-query >/dev/null; then
    say "not Debian or Ubuntu; install the equivalents of these packages: $*"
    return
  fi
  for package in "$@"; do installed "$package" || missing+=("$package"); done
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

apt_install() {
  local root=() log package
  if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then root=(sudo)
    else die "missing packages; install them as root: apt-get install $*"; fi
  fi
  say "installing $*"
  log=$(mktemp)
  # The tests start the packages' daemons themselves, so the daemons start neither now nor at boot. An existing policy
  # stays unchanged.
  local policy=/usr/sbin/policy-rc.d own_policy=
  if [ ! -e $policy ]; then
    own_policy=1
    # shellcheck disable=SC2064  # expanded now: `root` is local
    trap "${root[*]} rm -f $policy" EXIT
    printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee $policy >/dev/null
    "${root[@]}" chmod 755 $policy
  fi
  "${root[@]}" apt-get update >"$log" 2>&1 </dev/null || say "apt-get update failed; continuing with apt's current lists"
  if ! "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "$@" >>"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    die "apt-get install $* failed; the full output is in $log"
  fi
  rm -f "$log"
  if [ -n "$own_policy" ]; then "${root[@]}" rm -f $policy; trap - EXIT; fi
  for package in "${DAEMONS[@]}"; do
    if [[ " $* " == *" $package "* ]] && command -v systemctl >/dev/null; then
      "${root[@]}" systemctl disable "$package.service" >/dev/null 2>&1 || true
    fi
  done
}

usable() { # PYTHON: print "3.X PATH" (the real file behind links, shims and environments) if healthd can be built with it
  "$1" -c 'import ensurepip, os, sysconfig, sys, venv
v = sys.version_info[:2]
headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
(3, 10) <= v <= (3, 13) and os.path.exists(headers) or sys.exit(1)
print("%d.%d" % v, os.path.realpath(sys.executable))' 2>/dev/null
}

candidates() { # every command that may be a Python
  local name
  for name in python3 python3.{10..13}; do type -aP "$name" || true; done
  if command -v pyenv >/dev/null; then ls -d "$(pyenv root)"/versions/3.1[0-3].*/bin/python3 2>/dev/null || true; fi
}

interpreters() {
  local python
  candidates | while read -r python; do usable "$python" || true; done | sort -s -t. -k2,2n | awk '!seen[$1]++'
}

choose() { # print the Python for .venv: python3 of the PATH if it is usable
  local python found
  for python in python3 python3.{11,12,13,10}; do
    if found=$(usable "$python"); then echo "${found#* }"; return; fi
  done
  need python3 python3-venv python3-dev >&2
  usable /usr/bin/python3 >/dev/null || die "healthd needs Python 3.10 to 3.13, with venv and headers; none was found"
  echo /usr/bin/python3
}

java_package() { # print the OpenJDK of the distribution that Spark 4 runs on
  local version
  for version in 17 21 25; do
    if apt-cache show "openjdk-$version-jre-headless" >/dev/null 2>&1; then
      echo "openjdk-$version-jre-headless"
      return
    fi
  done
  echo default-jre-headless # apt has no lists yet
}

make_venv() { # DIRECTORY PYTHON PROJECT STAMP...: install PROJECT (".[dev]") into DIRECTORY, then make the stamps
  local log
  log=$(mktemp)
  if ! "$1/bin/python" -c pass 2>/dev/null; then # absent, or its interpreter was removed
    say "making $1 with $2"
    "$2" -m venv --clear "$1"
  fi
  say "installing $3 into $1"
  # Most installed modules are never imported: Python compiles the others at their first import.
  if ! "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --config-settings editable_mode=compat -e "$3" >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    die "pip install failed; the full output is in $log"
  fi
  rm -f "$log"
  touch "${@:4}"
}

case ${1:-} in
  venv)
    need "${BUILD_PACKAGES[@]}"
    python=$(choose)
    make_venv .venv "$python" ".[dev,docs,fleet,failslow,web]" .venv/.runtime .venv/.stamp ;;
  venv-runtime)
    need "${BUILD_PACKAGES[@]}"
    python=$(choose)
    make_venv .venv "$python" . .venv/.runtime ;;
  make) need make ;;
  java) need "$(java_package)" ;;
  test-packages) need "${TEST_PACKAGES[@]}" ;;
  interpreters) interpreters ;;
  venv-3.1[0-3])
    need "${BUILD_PACKAGES[@]}"
    python=$(interpreters | awk -v wanted="${1#venv-}" '$1 == wanted { print $2 }')
    [ -n "$python" ] || die "no usable Python ${1#venv-} on this machine"
    make_venv ".$1" "$python" ".[dev]" ".$1/.stamp" ;;
  *) sed -n '4,10s/^# *//p' "$0" >&2; exit 64 ;;
esac
