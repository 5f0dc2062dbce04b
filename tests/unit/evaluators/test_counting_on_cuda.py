"""What a CPU can prove of evaluators on CUDA: devices, shapes, and where the host waits."""

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
    """A point in the work of a GPU, with a note of each wait for it."""

    made, waits = 0, []

    def record(self, stream):
        self.number = Event.made
        Event.made += 1

    def synchronize(self):
        self.waits.append(self.number)


class BlockingCopies(TorchDispatchMode):
    """Count the copies between devices for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copy = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and not (kwargs or {}).get("non_blocking"):
            self.count += copy.device != args[0].device
        return copy


# Fakes refuse tensors of two devices, and shapes that depend on values. Images without an unseen
# label are found by labels in main memory, whose values fakes do not have: tests/gpu does that.
@pytest.mark.parametrize("name", EVALUATORS)
def test_a_batch_is_counted_without_waiting_for_it(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(Event, "made", 0)
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
            # The first batch brings the counts to the device.
            assert number == 0 or copies.count == 0
            # Each batch waits for the one before at most.
            assert Event.waits == [*range(min(number, Event.made))]
