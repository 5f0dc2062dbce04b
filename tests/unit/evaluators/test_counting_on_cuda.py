"""Host syncs of evaluators on CUDA, on fake tensors."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator

CLASSES = 12
EVALUATORS = {
    "multi_label": MultiLabelEvaluator,
    "partial": PartialLabelEvaluator,
    "single_label": SingleLabelEvaluator,
    "zero_shot": lambda classes: ZeroShotEvaluator(classes, unseen=(1, 5), images="all"),
}


class Event:
    """CUDA event that records the calls of `synchronize`."""

    created, waits = 0, []

    def record(self, stream):
        self.number = Event.created
        Event.created += 1

    def synchronize(self):
        self.waits.append(self.number)


class BlockingCopies(TorchDispatchMode):
    """Count the blocking copies between devices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copy = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and not (kwargs or {}).get("non_blocking"):
            self.count += copy.device != args[0].device
        return copy


# Fake tensors have no values. tests/gpu covers the selection of images with an unseen label.
@pytest.mark.parametrize("name", EVALUATORS)
def test_update_does_not_wait_for_its_batch(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(Event, "created", 0)
    monkeypatch.setattr(Event, "waits", [])
    evaluator = EVALUATORS[name](CLASSES)
    if name in ("multi_label", "partial"):
        evaluator.logit_threshold = torch.zeros(CLASSES, dtype=torch.float64)
    evaluator.update(torch.zeros(0, CLASSES), torch.zeros(0, CLASSES))

    with FakeTensorMode(allow_non_fake_inputs=True):
        for number in range(3):
            logits = torch.randn(4, CLASSES, device="cuda:0")
            labels = torch.zeros(4, CLASSES, dtype=torch.int8)
            with BlockingCopies() as copies:
                evaluator.update(logits, labels)
            # The first batch moves the counts to the device.
            assert number == 0 or copies.count == 0
            # Each batch waits at most for the previous one.
            assert Event.waits == list(range(min(number, Event.created)))
