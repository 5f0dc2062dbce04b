#!/usr/bin/env bash
# Train on all GPUs of this machine, or on PROCESSES of them:
#
#   scripts/launch/one_node.sh +experiment=coco_tresnet_l data.root=/data/coco
#   PROCESSES=2 scripts/launch/one_node.sh +experiment=digits device=cpu
#
# When a process fails, torchrun starts all of them again (RESTARTS times), and they go on from the
# last checkpoint.
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" --max-restarts "${RESTARTS:-2}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 60 \
    -m mldec.train "$@"
