#!/usr/bin/env bash
# Measure this checkout on a machine with a CUDA device, in three commands of at most eight minutes.
#
#   scripts/maintainers/gpu_report.sh training|inference|tests [OUT.json [PART ...]]
#
# See scripts/maintainers/gpu_report.py. For a machine without internet, build wheels elsewhere with the
# same Python version, and install them there:
#
#   pip wheel --no-deps -w wheels 'hydra-core>=1.3.8,<1.4' 'omegaconf>=2.3,<2.4' 'antlr4-python3-runtime==4.9.*' pycocotools
#   pip install --no-index --no-deps wheels/*.whl
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # this checkout, installed or not
exec python3 scripts/maintainers/gpu_report.py "$@"
