#!/bin/bash
# The unit tests on each supported Python of this machine but that of .venv, which `make unit` and `make test` run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in $(scripts/setup.sh interpreters | cut -d' ' -f1); do
  [ "$version" != "$own" ] || continue
  environment=.venv-$version
  [ "$environment/.stamp" -nt pyproject.toml ] || scripts/setup.sh "venv-$version"
  echo "unit tests on Python $version"
  "$environment/bin/python" -m pytest --ignore=tests/e2e -p no:cacheprovider
done
