#!/bin/bash
# Run scripts/test_spark.sh for at most SECONDS. Exits with 0 and a message if Java or pyspark is not available or the
# time is over; differing results fail.
#   scripts/test_spark_within.sh SECONDS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
status=0
timeout --kill-after=10 "$1" scripts/test_spark.sh || status=$?
case $status in
  0) ;;
  75) echo "spark DID NOT RUN: see the reason above" ;;
  124 | 137) echo "spark DID NOT FINISH within $1 s" ;;
  *) exit 1 ;;
esac
