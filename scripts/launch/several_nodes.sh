#!/usr/bin/env bash
# Train on several machines: start this on each of them, with the same arguments.
#
#   NODES=2 MAIN=node-0:29400 RUN=coco_l \
#       scripts/launch/several_nodes.sh +experiment=coco_tresnet_l data.root=/data/coco
#
# NODES: how many; MAIN: one of them and a free port; RUN: any word, the same on all. The data must
# be on every machine. The run's folder is read and written by one process only (rank 0), so
# outputs/ need not be shared. If it is not, and the job may start again elsewhere, give all
# machines a shared folder: hydra.run.dir=/shared/outputs/coco_l.
# INTERFACE: the network between the machines, such as eth0, if it is not the one that their host
# names stand for.
set -euo pipefail
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
exec torchrun --nnodes "${NODES:?how many machines}" --nproc-per-node "${PROCESSES:-gpu}" \
    --max-restarts "${RESTARTS:-2}" --rdzv-backend c10d \
    --rdzv-endpoint "${MAIN:?host:port of one machine}" --rdzv-id "${RUN:?a word for this run}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 60 \
    -m mldec.train "$@"
