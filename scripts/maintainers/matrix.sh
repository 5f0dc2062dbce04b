#!/usr/bin/env bash
# Run the default tests with several versions of Python and torch, and print a table:
#   scripts/maintainers/matrix.sh python3.11=2.11.0 python3.13=newest
# Arguments after -- are passed to pytest:
#   scripts/maintainers/matrix.sh python3.11=newest -- tests/unit
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pairs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do pairs+=("$1"); shift; done
[ $# -gt 0 ] && shift

printf '%s\n' "| Python | torch | torchvision | timm | tests |" "|---|---|---|---|---|"
for pair in "${pairs[@]}"; do
  python=${pair%%=*} torch=${pair#*=}
  wanted=torch
  [ "$torch" = newest ] || wanted="torch==$torch"
  "$python" -m venv "$work/env"
  "$work/env/bin/pip" install -q "$wanted" torchvision -e ".[dev]"
  summary=$("$work/env/bin/python" -m pytest "$@" 2>&1 | tail -n 1) || true
  versions=$("$work/env/bin/python" - <<'PYTHON'
import platform
from importlib.metadata import version

print(" | ".join([platform.python_version(), *map(version, ("torch", "torchvision", "timm"))]))
PYTHON
  )
  echo "| $versions | $summary |"
  rm -rf "$work/env"
done
