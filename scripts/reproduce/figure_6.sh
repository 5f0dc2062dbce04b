#!/usr/bin/env bash
exec python "$(dirname "$0")/run.py" figure6 "$@"
