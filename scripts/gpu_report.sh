#!/usr/bin/env bash
# Measure this checkout on a machine with a CUDA device, in ten minutes, into one JSON file.
#
#   scripts/gpu_report.sh [benchmarks/gpu.json]
#
# scripts/gpu_report.py says what is measured, and which environment variables it reads. It has not
# been run on a CUDA device yet; DEVICE=cpu tries it without one.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python scripts/gpu_report.py "$@"
