#!/bin/bash
# Build dist/healthd_VERSION-REVISION~debNN_ARCH.deb for each RELEASE in a throw-away root of that release: mmdebstrap
# makes the root once, systemd-nspawn builds in an overlay of it. Needs root, both programs, Debian's archive and PyPI.
#   scripts/package.sh [RELEASE ...]   default: bookworm and trixie; jammy and noble are untested
#   scripts/package.sh here            build on this machine for its own release, without root; lists missing packages
# REVISION=2 is the next package of the same version. OUT=DIRECTORY replaces dist. MIRROR=URL replaces Debian's archive,
# PIP_INDEX_URL=URL replaces PyPI; proxies are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TREE=$PWD
OUT=$(realpath "${OUT:-dist}")
CACHE=/var/cache/healthd-packages
BUILD_PACKAGES=(ca-certificates debhelper gcc libc6-dev libsystemd-dev pkg-config python3-dev python3-venv)
PASSED_ON=(REVISION SOURCE_DATE_EPOCH PIP_INDEX_URL http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY)

die() { echo "package: $*" >&2; exit 1; }

suffix() { # RELEASE: print the end of its version; a newer release has a higher one
  case $1 in
    bookworm) echo deb12 ;; trixie) echo deb13 ;;
    jammy) echo ubuntu22.04 ;; noble) echo ubuntu24.04 ;;
    *) die "no release $1: bookworm, trixie, jammy, noble, or here" ;;
  esac
}

lay_out() { # DIRECTORY: copy the files to pack: those that git does not ignore, or all files of an sdist
  if git -c safe.directory='*' ls-files -z --cached --others --exclude-standard >"$1.files" 2>/dev/null; then
    # a file that is deleted but not yet committed is left out
    while IFS= read -r -d '' file; do if [ -e "$file" ] || [ -L "$file" ]; then printf '%s\0' "$file"; fi; done <"$1.files" |
      tar -c --null -T - | tar -x -C "$1"
  else cp -a . "$1"; fi
}

build() { # DIRECTORY RELEASE [OPTION]: build in a copy of the tree on that release; the package is written next to the copy
  local version maintainer
  cd "$1"
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)-${REVISION:-1}~$(suffix "$2")
  cp -r packaging/debian debian
  maintainer=$(sed -n 's/^maintainers = \[{name = "\(.*\)", email = "\(.*\)"}\]$/\1 <\2>/p' pyproject.toml)
  [ -n "$maintainer" ] || die "pyproject.toml has no line maintainers = [{name = ..., email = ...}]"
  sed -i "s|^Maintainer: .*|Maintainer: $maintainer|" debian/control
  cp packaging/systemd/healthd.service debian/
  if [ -e packaging/systemd/healthd-tmpfiles.conf ]; then cp packaging/systemd/healthd-tmpfiles.conf debian/healthd.tmpfiles; fi
  cat >debian/changelog <<END
healthd ($version) $2; urgency=medium

  * /usr/share/doc/healthd/changelog.gz lists the changes.

 -- $maintainer  $(date -R -u -d "@$SOURCE_DATE_EPOCH")
END
  echo "package: building healthd $version"
  dpkg-buildpackage --build=binary --no-sign "${@:3}" >../log 2>&1 </dev/null || { tail -n 30 ../log >&2; die "the build failed"; }
}

root_of() { # RELEASE: print the folder of its root; create it if it does not exist
  local key root mirror=() # --options and URLs of mmdebstrap
  key=$(sha256sum <<<"${BUILD_PACKAGES[*]}" | cut -c -12)
  root=$CACHE/$1-$key
  mkdir -p $CACHE
  exec 9>$CACHE/lock-"$1"
  flock 9
  if [ ! -e "$root" ]; then
    echo "package: making a root of $1 in $CACHE" >&2
    rm -rf "$root.new"
    case $1 in jammy | noble) mirror=(--components=main,universe) ;; esac
    if [ -n "${MIRROR:-}" ]; then mirror+=("$MIRROR"); fi
    mmdebstrap --quiet --variant=minbase --include="$(IFS=,; echo "${BUILD_PACKAGES[*]}")" --dpkgopt=force-unsafe-io \
      "$1" "$root.new" "${mirror[@]}" >&2 </dev/null || die "mmdebstrap made no root of $1"
    mv "$root.new" "$root"
  fi
  echo "$root"
}

in_root_of() { # RELEASE: build in an overlay of its root; the overlay is removed at the end
  local root options=() name
  root=$(root_of "$1")
  mkdir -p "$CACHE/pip-$1"
  for name in "${PASSED_ON[@]}"; do if [ -n "${!name:-}" ]; then options+=("--setenv=$name=${!name}"); fi; done
  # Use the certificates that this machine trusts: a site may have its own mirror or proxy.
  if [ -e /etc/ssl/certs/ca-certificates.crt ]; then options+=(--bind-ro=/etc/ssl/certs/ca-certificates.crt); fi
  systemd-nspawn --quiet --register=no --keep-unit --volatile=overlay --directory="$root" --machine="healthd-package-$$" \
    --resolv-conf=copy-host --timezone=off --link-journal=no --console=pipe --as-pid2 --bind="$work:/build" \
    --bind="$CACHE/pip-$1:/root/.cache/pip" --setenv=PIP_CERT=/etc/ssl/certs/ca-certificates.crt "${options[@]}" \
    bash /build/healthd/scripts/package.sh inside "$1" </dev/null
}

: "${SOURCE_DATE_EPOCH:=$(git -c safe.directory='*' log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}"
export SOURCE_DATE_EPOCH
if [ "${1:-}" = inside ]; then
  build "$TREE" "$2" --no-check-builddeps # the root already has Build-Depends and the compiler
  exit
fi

[ $# -gt 0 ] || set -- bookworm trixie
for release in "$@"; do [ "$release" = here ] || suffix "$release" >/dev/null; done
mkdir -p "$OUT"
for release in "$@"; do
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir "$work/healthd"
  lay_out "$work/healthd"
  if [ "$release" = here ]; then
    (build "$work/healthd" "$(. /etc/os-release; echo "$VERSION_CODENAME")")
  else
    [ "$(id -u)" = 0 ] || die "only root can build for another release; scripts/package.sh here builds for this one"
    for program in mmdebstrap systemd-nspawn; do
      command -v $program >/dev/null || die "$program is missing: apt-get install mmdebstrap systemd-container"
    done
    in_root_of "$release" || die "no package for $release"
  fi
  mv "$work"/*.deb "$OUT/"
  rm -rf "$work"
  trap - EXIT
done
(cd "$OUT" && ls -l healthd_*.deb)
