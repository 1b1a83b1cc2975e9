#!/bin/bash
# Build the wheel and the sdist into dist/, check their contents, install the wheel into a fresh environment and run it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
die() { echo "wheel: $*" >&2; exit 1; }

echo "wheel: building"
rm -f dist/*.whl dist/*.tar.gz  # dist/*.deb belong to make package
export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt # as in scripts/setup.sh
# The environment has the setuptools version of the constraints.
.venv/bin/python -m build --no-isolation --outdir dist . >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; die "the build failed"; }

strangers=$(.venv/bin/python tests/support/wheel_files.py dist/*.whl) || die "$strangers"

# the sdist must contain the files that packagers need
tar tzf dist/*.tar.gz | sed 's|^[^/]*/||' | sort >"$work/sdist"
missing=$(find conf packaging -type f | sort | comm -23 - "$work/sdist")
[ -z "$missing" ] || die "not in the sdist: ${missing//$'\n'/ }"

echo "wheel: installing into a fresh environment"
.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile dist/*.whl >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log" >&2; die "the wheel does not install"; }
list=$(cd "$work" && venv/bin/healthd list) || die "healthd list failed"
for check in checks/[a-z]*.py; do
  grep -qw "$(basename "$check" .py)" <<<"$list" || die "healthd list does not show $check"
done
echo "wheel: running each command"
wrong=$(.venv/bin/python tests/support/wheel_commands.py "$work/venv") || die "$wrong"
echo "wheel: $(cd dist && echo *.whl) works, $(.venv/bin/python -m zipfile --list dist/*.whl | tail -n +2 | wc -l) files, $(stat -c %s dist/*.whl) bytes"
