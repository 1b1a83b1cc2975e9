#!/bin/bash
# The unit tests on other supported Pythons of this machine than that of .venv, side by side.
#   scripts/unit_others.sh        the oldest and the newest; but no wide tests, and none of a table in tests/conftest.py
#   scripts/unit_others.sh --all [OPTION...]
#                                 each, all tests, with options of pytest; one that failed only beside the others fails
# What is of the repository and not of a version of Python is left to .venv (marked one_python), and so are most random
# examples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Thousands of small files, many of them flushed, lie in memory where there is enough and programs may run in it.
shm=/dev/shm
if [ -z "${TMPDIR:-}" ] && [ -w $shm ] && ! findmnt --noheadings --output OPTIONS --target $shm | grep -qw noexec &&
  [ "$(df --output=avail --block-size=M $shm | tail -n 1 | tr -dc 0-9)" -ge 4096 ]; then
  export TMPDIR=$shm
fi

own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

mapfile -t versions < <(scripts/setup.sh interpreters | cut -d' ' -f1 | grep -vxF "$own" || true)
if [ "${1:-}" = --all ]; then
  options=(-n "$((($(nproc) + 1) / 2))" -m 'not long and not gpu and not one_python' --flaky-is-red "${@:2}")
else
  options=(-n "$(nproc)" -m 'not long and not gpu and not one_python and not wide and not own_python')
  [ ${#versions[@]} -le 2 ] || versions=("${versions[0]}" "${versions[-1]}")
fi
running=()
for version in "${versions[@]}"; do
  [ ".venv-$version/.stamp" -nt pyproject.toml ] && [ ".venv-$version/.stamp" -nt constraints.txt ] ||
    scripts/setup.sh "venv-$version"
  echo "unit tests on Python $version"
  HEALTHD_FEW_EXAMPLES=1 ".venv-$version/bin/python" scripts/run_tests.py "${options[@]}" --ignore=tests/e2e >"$logs/$version" 2>&1 </dev/null &
  running+=("$!")
done
failed=0
for place in "${!running[@]}"; do
  wait "${running[$place]}" && outcome=passed || { outcome=FAILED; failed=1; }
  echo "unit tests on Python ${versions[$place]}: $outcome: $(grep -aE '^[0-9]+ (passed|failed)' "$logs/${versions[$place]}" | tail -n 1)"
  grep -a '^FLAKY ' "$logs/${versions[$place]}" || true
  [ "$outcome" = passed ] || cat "$logs/${versions[$place]}"
done
exit "$failed"
