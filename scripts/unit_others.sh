#!/bin/bash
# Run the unit tests in parallel on each supported Python of this machine except the one of .venv.
#   scripts/unit_others.sh [PYTEST OPTION...]
# Tests that do not depend on the Python version (marked one_python), and most random examples, run in .venv only.
# A test that fails only in parallel with others counts as failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The tests write thousands of small files and flush many: use memory if it is large enough and programs may run there.
shm=/dev/shm
if [ -z "${TMPDIR:-}" ] && [ -w $shm ] && ! findmnt --noheadings --output OPTIONS --target $shm | grep -qw noexec &&
  [ "$(df --output=avail --block-size=M $shm | tail -n 1 | tr -dc 0-9)" -ge 4096 ]; then
  export TMPDIR=$shm
fi

own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

mapfile -t versions < <(scripts/setup.sh interpreters | cut -d' ' -f1 | grep -vxF "$own" || true)
options=(-n "$((($(nproc) + 1) / 2))" -m 'not long and not gpu and not one_python' --flaky-is-red "$@")
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
