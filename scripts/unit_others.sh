#!/bin/bash
# The unit tests on each supported Python of this machine but that of .venv, which `make unit` and `make test` run. All
# at once, each in half as many processes as there are cores: three Pythons keep them all busy, and no more wait for a
# core than must. What is of the repository and not of a version of Python is left to .venv (marked one_python), and so
# are most random examples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

versions=()
for version in $(scripts/setup.sh interpreters | cut -d' ' -f1); do
  [ "$version" != "$own" ] || continue
  [ ".venv-$version/.stamp" -nt pyproject.toml ] || scripts/setup.sh "venv-$version"
  versions+=("$version")
done
running=()
for version in "${versions[@]}"; do
  echo "unit tests on Python $version"
  HEALTHD_FEW_EXAMPLES=1 ".venv-$version/bin/python" -m pytest -m "not long and not gpu and not one_python" -n "$((($(nproc) + 1) / 2))" \
    --ignore=tests/e2e -p no:cacheprovider >"$logs/$version" 2>&1 </dev/null &
  running+=("$!")
done
failed=0
for place in "${!running[@]}"; do
  wait "${running[$place]}" && outcome=passed || { outcome=FAILED; failed=1; }
  echo "unit tests on Python ${versions[$place]}: $outcome"
  [ "$outcome" = passed ] || cat "$logs/${versions[$place]}"
done
exit "$failed"
