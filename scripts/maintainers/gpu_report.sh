#!/usr/bin/env bash
# Measure this checkout on a machine with a CUDA device, in three commands of at most eight minutes.
#
#   scripts/maintainers/gpu_report.sh training|inference|tests [OUT.json [PART ...]]
#
# See scripts/maintainers/gpu_report.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # this checkout, installed or not
exec python3 scripts/maintainers/gpu_report.py "$@"
