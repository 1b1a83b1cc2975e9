#!/bin/bash
# Run every query and every answer of the fleet store on DuckDB and on Spark over small stores, and compare the results.
# Sets up .venv-spark (pyspark is a source package of 456 MB) and the distribution's Java if they are missing.
# Exit status: 0 the results are equal, 1 they differ, 75 Java or pyspark is not available.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NOT_HERE=75
not_here() { echo "spark: $*" >&2; exit $NOT_HERE; }

began=$SECONDS
if ! java -version >/dev/null 2>&1; then
  scripts/setup.sh java || not_here "no Java: the queries did not run on Spark"
fi
python=$(scripts/setup.sh interpreters | awk '{ print $2 }' | tail -n 1)
[ -n "$python" ] || not_here "no Python 3.10 to 3.13"
wanted=$(sed -n 's/^spark = \[\(.*\)\]$/\1/p; s/^    \("msgspec[^"]*"\).*/\1/p; s/^fleet = \[\("duckdb[^"]*"\).*\("scipy[^"]*"\).*/\1 \2/p' pyproject.toml | tr -d '",')
if ! .venv-spark/bin/python -c pass 2>/dev/null; then "$python" -m venv --clear .venv-spark || not_here "no .venv-spark"; fi
if [ "$(cat .venv-spark/.wanted 2>/dev/null)" != "$wanted" ] || [ constraints.txt -nt .venv-spark/.wanted ]; then
  echo "spark: installing into .venv-spark:" $wanted
  log=$(mktemp)
  # shellcheck disable=SC2086  # one word per package
  if ! .venv-spark/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $wanted >"$log" 2>&1 </dev/null; then
    tail -n 5 "$log" >&2
    rm -f "$log"
    not_here "pyspark cannot be installed: the queries did not run on Spark"
  fi
  rm -f "$log"
  echo "$wanted" >.venv-spark/.wanted
fi
echo "spark: set up in $((SECONDS - began)) s; $(java -version 2>&1 | head -n 1)"
status=0
.venv-spark/bin/python tests/support/spark_engines.py || status=$?
echo "spark: done in $((SECONDS - began)) s"
exit $status
