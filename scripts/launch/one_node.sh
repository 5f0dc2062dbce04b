#!/usr/bin/env bash
# Train on all GPUs of this machine, or on PROCESSES of them:
#
#   scripts/launch/one_node.sh +experiment=coco_tresnet_l data.root=/data/coco
#   PROCESSES=2 scripts/launch/one_node.sh +experiment=digits device=cpu
#
# If a process fails, torchrun restarts all of them (at most RESTARTS times). They resume from the
# last checkpoint.
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" --max-restarts "${RESTARTS:-2}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 60 \
    -m mldec.train "$@"
