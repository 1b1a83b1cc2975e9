#!/bin/bash
# scripts/test_spark.sh, for at most SECONDS. Where Java and pyspark cannot be had, or not so soon, nothing is wrong, and
# it is said; answers that differ are wrong.
#   scripts/test_spark_within.sh SECONDS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
status=0
timeout --kill-after=10 "$1" scripts/test_spark.sh || status=$?
case $status in
  0) ;;
  75) echo "spark DID NOT RUN: the reason stands above" ;;
  124 | 137) echo "spark DID NOT RUN to its end within $1 s" ;;
  *) exit 1 ;;
esac
