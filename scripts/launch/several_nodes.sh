#!/usr/bin/env bash
# Train on several machines: run this on each of them, with the same arguments.
#
#   NODES=2 MAIN=node-0:29400 RUN=coco_l \
#       scripts/launch/several_nodes.sh +experiment=coco_tresnet_l data.root=/data/coco
#
# NODES is the number of machines. MAIN is the address and a free port of any machine. RUN is any
# name that is the same on all machines. Each machine needs the data. Only rank 0 uses the folder of
# the run. If the job may restart on other machines, this folder must be shared, for example
# hydra.run.dir=/shared/outputs/coco_l.
# INTERFACE is the network interface between the machines, such as eth0. The default is the
# interface of the host name.
set -euo pipefail
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
exec torchrun --nnodes "${NODES:?number of machines}" --nproc-per-node "${PROCESSES:-gpu}" \
    --max-restarts "${RESTARTS:-2}" --rdzv-backend c10d \
    --rdzv-endpoint "${MAIN:?host:port of one machine}" --rdzv-id "${RUN:?name of the run}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 60 \
    -m mldec.train "$@"
