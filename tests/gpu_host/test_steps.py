"""Training steps of one experiment per family on the null GPU."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch

# Experiments and their numbers of classes.
EXPERIMENTS = {
    "digits": 10,
    "digits_zsl": 10,
    "coco_tresnet_l": 80,
    "q2l_coco_resnet101_448": 80,
    "coco_partial_rps": 80,
    "coco_single_positive": 80,
    "voc_single_positive": 20,
    "vg500_tresnet_l": 500,
    "openimages_tresnet_m": 9605,
    "imagenet_resnet50_a2": 1000,
    "cars_tresnet_l": 196,
    "cifar100_swin_l": 100,
    "nuswide_zsl_tresnet_m": 925,
    "nuswide_zsl_clip_b16": 925,
    "coco_dinov3_b": 80,
    "finetune": 20,
    "finetune_frozen": 20,
    "finetune_dinov2_frozen": 20,
    "finetune_dinov2": 20,
    "tags_tresnet_l": 12547,
}

RECORD = Path(__file__).parent / "launches.json"  # launches per step with some version of torch
# Host syncs per step, if any. Muon and LAMB read the condition of `step_if`; timm's DINOv3 creates
# a tensor on the host.
STREAM_WAITS = {"digits": 1, "digits_zsl": 1, "imagenet_resnet50_a2": 1, "coco_dinov3_b": 1}
PAGEABLE_COPIES = {"coco_dinov3_b": 1}


@pytest.fixture(scope="module")
def steps(null_gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    results = null_gpu.run("steps.py", json.dumps(EXPERIMENTS), cwd=folder).result
    # To record: RECORD_LAUNCHES=1 pytest tests/gpu_host/test_steps.py
    if os.environ.get("RECORD_LAUNCHES"):
        launches = {name: step["counts"]["launches"] for name, step in results.items()}
        record = {"torch": torch.__version__, "timm": timm.__version__, "launches": launches}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return results


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_step_needs_no_other_host_sync(steps, experiment):
    step = steps[experiment]
    assert "error" not in step, step["error"]
    assert step["fault"] is None

    counts = step["counts"]
    assert counts["launches"] > 50
    assert counts["stream_waits"] == STREAM_WAITS.get(experiment, 0)
    assert counts["pageable_copies"] == PAGEABLE_COPIES.get(experiment, 0)
    assert counts["event_waits"] == 0
    assert counts["device_synchronizations"] == 0


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_step_has_recorded_launches(steps, experiment):
    record = json.loads(RECORD.read_text())
    if (record["torch"], record["timm"]) != (torch.__version__, timm.__version__):
        pytest.skip(f"recorded with torch {record['torch']} and timm {record['timm']}")
    launches = steps[experiment]["counts"]["launches"]
    assert launches <= 1.05 * record["launches"][experiment]
