#!/usr/bin/env bash
# Measure this checkout on a machine with a CUDA device and write one JSON under benchmarks/.
#
#   scripts/gpu_report.sh [benchmarks/gpu.json]
#
# It holds the outcome of each test marked gpu (training in every precision, with and without
# compile; resume equality with train.deterministic=true; the head's numbers), images/s of training
# and inference of multi-label experiments on one GPU, the head against the official loop, the
# metric at 9,605 classes, and digits trained and evaluated; with hardware, versions, date and
# commit. Several GPUs (DDP with NCCL, sync_batchnorm) are not in it. It has not been run on a CUDA
# device yet.
#
# Environment: EXPERIMENTS, PRECISIONS, COMPILE ("false true"), BATCH_SIZE, REPEATS, TESTS=0 to
# leave out the tests, and DEVICE=cpu to try the script without a GPU (such figures say nothing
# about one).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-benchmarks/gpu.json}")
device=${DEVICE:-cuda}
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

if [ "${TESTS:-1}" = 1 ]; then
    echo "== tests marked gpu"
    python -m pytest -n 0 -m gpu --junit-xml "$parts/tests.xml" || true # a failure is part of the report
fi

for experiment in ${EXPERIMENTS:-coco_tresnet_m coco_tresnet_l}; do
    for precision in ${PRECISIONS:-bf16 fp16 fp32}; do
        for compile in ${COMPILE:-false true}; do
            echo "== throughput of $experiment, $precision, compile=$compile"
            python -m mldec.benchmark throughput --experiment "$experiment" \
                --repeats "${REPEATS:-20}" \
                --json "$parts/throughput-$experiment-$precision-$compile.json" \
                "device=$device" "train.precision=$precision" "train.compile=$compile" \
                ${BATCH_SIZE:+"train.batch_size=$BATCH_SIZE"}
        done
    done
done

echo "== head against the official loop"
python -m mldec.benchmark head --device "$device" --json "$parts/head.json"
echo "== metric at 9,605 classes"
python -m mldec.benchmark metric --json "$parts/metric.json"
echo "== digits"
start=$SECONDS
python -m mldec.train +experiment=digits "device=$device" "hydra.run.dir=$parts/digits"
seconds=$((SECONDS - start))
python -m mldec.evaluate "$parts/digits/checkpoints/best.pt" "device=$device" \
    --json "$parts/digits.json"

python - "$parts" "$out" "$seconds" <<'PYTHON'
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

parts, out, seconds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
head = json.loads((parts / "head.json").read_text())
digits = json.loads((parts / "digits.json").read_text())
throughput = sorted(parts.glob("throughput-*.json"))

tests = {}
if (parts / "tests.xml").exists():
    for case in ElementTree.parse(parts / "tests.xml").iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        tests[case.get("name")] = kinds[0] if kinds else "passed"

report = {
    "environment": head["environment"],
    "tests": tests,
    "throughput": [json.loads(path.read_text())["figures"] for path in throughput],
    "head": head["figures"],
    "metric": json.loads((parts / "metric.json").read_text())["figures"],
    "digits": {"mAP": digits["metrics"]["mAP"], "weights": digits["weights"], "seconds": seconds},
}
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps(report, indent=1) + "\n")
print(f"written: {out}")
PYTHON
