"""The function behind every number, against a plain loop; the command is in test_evaluate.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.metrics import average_precision_score, recall_score
from torch import Tensor, nn

from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.data.loader import Batch
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split, fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.evaluation import (
    Results,
    all_scores,
    evaluate,
    evaluate_all,
    left_out,
    memory_advice,
    score,
)
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast

CPU = torch.device("cpu")
GIB = 2**30


class Shades:
    """Images whose label is their colour; some of them cannot be read."""

    def __init__(self, count: int, bad: tuple[int, ...] = ()) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise DataError(f"image {index} is broken")
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 4, 4), dtype=torch.uint8, generator=generator)
        return image, nn.functional.one_hot(torch.tensor(index % 3), 3).to(torch.int8)

    def name(self, index: int) -> str:
        return f"image {index}"


class Colours(nn.Module):
    """The mean of each channel as the logit of its class; dropout in training."""

    def forward(self, images: Tensor, queries: Tensor | None) -> Tensor:
        assert not self.training
        assert queries is None or queries.shape == (3, 5)
        return images.float().mean((2, 3)) / 64 - 2


def data(
    count: int = 20, bad: tuple[int, ...] = (), *, exclusive: bool = False, words: bool = False
) -> DataModule:
    queries = torch.zeros(3, 5) if words else None
    classes = Classes(("red", "green", "blue"), exclusive, queries)
    split = Split(Shades(count, bad), classes)

    def evaluator(classes: Classes) -> Any:
        if exclusive:
            return SingleLabelEvaluator(len(classes), top_k=2)
        return MultiLabelEvaluator(len(classes))

    policy = "skip" if bad else "stop"
    return DataModule(lambda: split, lambda: split, evaluator, EvalTransform(image_size=4), policy)


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["+experiment=digits", "train.workers=0", "train.eval_batch_size=6"])


@pytest.mark.parametrize("bad", [(), (0, 7, 19)])
@pytest.mark.parametrize("words", [True, False])
def test_each_image_counts_once(config: Config, bad: tuple[int, ...], words: bool) -> None:
    images = [index for index in range(20) if index not in bad]
    shown = [fixed_sample(Shades(20), index) for index in images]
    logits = torch.stack([image.float().mean((1, 2)) / 64 - 2 for image, _ in shown])
    targets = torch.stack([target for _, target in shown])

    results = evaluate(Colours(), data(20, bad, words=words), config, device=CPU)
    per_class = [average_precision_score(targets[:, k], logits[:, k]) for k in range(3)]
    expected = 100 * sum(per_class) / 3
    assert results.metrics["mAP"] == pytest.approx(expected)
    assert results.images == len(images)
    assert [message.partition(" is")[0] for message in results.bad] == [f"image {i}" for i in bad]
    assert results.confusions is None
    assert all(len(column) == 3 for column in results.per_class.values())


def test_the_scores_of_a_batch_come_with_its_images(config: Config) -> None:
    bad = (1, *range(6, 12))
    batches = list(score([Colours().eval()], data(20, bad), config, device=CPU))
    assert [len(logits) for _, [logits] in batches] == [5, 0, 6, 2]
    assert [len(batch.bad) for batch, _ in batches] == [1, 6, 0, 0]

    indices = torch.cat([batch.indices for batch, _ in batches]).long().tolist()
    assert indices == [index for index in range(20) if index not in bad]
    readable = [logits for batch, [logits] in batches if len(batch.images)]
    for index, row in zip(indices, torch.cat(readable), strict=True):
        assert torch.equal(row, fixed_sample(Shades(20), index)[0].float().mean((1, 2)) / 64 - 2)


def test_several_models_share_one_reading_of_the_images(config: Config) -> None:
    class Opposite(Colours):
        def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
            return -super().forward(images, queries)

    read: list[int] = []

    class Counted(Shades):
        def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
            read.append(index)
            return super().load(index, rng)

    module = data(20, (1,))
    counted = replace(module, load_val=lambda: Split(Counted(20, (1,)), module.val.classes))
    models = [Colours().train(), Opposite().eval()]
    both = evaluate_all(models, counted, config, device=CPU)
    assert sorted(read) == list(range(20))
    assert [model.training for model in models] == [True, False]
    for model, results in zip(models, both, strict=True):
        assert results == evaluate(model, module, config, device=CPU)
    assert both[0].metrics["mAP"] != both[1].metrics["mAP"]


def test_an_observer_gets_every_batch_that_can_be_read_with_its_logits(config: Config) -> None:
    bad = (1, *range(6, 12))
    seen: list[tuple[Batch, Tensor]] = []
    evaluate(
        Colours(), data(20, bad), config, device=CPU, observe=lambda *batch: seen.append(batch)
    )
    expected = [
        (batch, logits)
        for batch, [logits] in score([Colours().eval()], data(20, bad), config, device=CPU)
        if len(batch.images)
    ]
    assert len(seen) == len(expected) == 3
    for (batch, logits), (wanted, wanted_logits) in zip(seen, expected, strict=True):
        assert torch.equal(batch.images, wanted.images)
        assert torch.equal(batch.targets, wanted.targets)
        assert torch.equal(logits, wanted_logits)


def test_all_scores_are_those_of_the_images_that_can_be_read(config: Config) -> None:
    bad = (1, *range(6, 12))
    scores = all_scores(Colours().train(), data(20, bad), config, device=CPU, path="x.pt")
    assert scores.indices.tolist() == [index for index in range(20) if index not in bad]
    assert [message.partition(" is")[0] for message in scores.bad] == [f"image {i}" for i in bad]
    for index, labels, logits in zip(scores.indices, scores.labels, scores.logits, strict=True):
        image, target = fixed_sample(Shades(20), int(index))
        assert logits.tolist() == (image.float().mean((1, 2)) / 64 - 2).tolist()
        assert labels.tolist() == target.tolist()


def test_scores_that_are_not_finite_name_the_checkpoint(config: Config) -> None:
    class Broken(Colours):
        def forward(self, images: Tensor, queries: Tensor | None) -> Tensor:
            return super().forward(images, queries) / 0

    with pytest.raises(DataError, match=r"x\.pt: a score is not finite"):
        all_scores(Broken(), data(4), config, device=CPU, path="x.pt")


def test_thresholds_take_the_place_of_those_of_the_data(config: Config) -> None:
    thresholds = torch.tensor([-0.1, 0.0, 0.1], dtype=torch.float64)
    results = evaluate(Colours(), data(), config, device=CPU, logit_threshold=thresholds)
    shown = [fixed_sample(Shades(20), index) for index in range(20)]
    logits = torch.stack([image.float().mean((1, 2)) / 64 - 2 for image, _ in shown])
    targets = torch.stack([target for _, target in shown])
    for k in range(3):
        expected = 100 * recall_score(targets[:, k], logits[:, k] > thresholds[k])
        assert results.per_class["recall"][k] == pytest.approx(expected)

    with pytest.raises(ConfigError, match="data: its evaluator takes no thresholds"):
        evaluate(Colours(), data(exclusive=True), config, device=CPU, logit_threshold=0.0)


def test_confusions_are_counted_where_an_image_has_one_label(config: Config) -> None:
    results = evaluate(Colours(), data(exclusive=True), config, device=CPU)
    expected: dict[tuple[int, int], int] = {}
    for index in range(20):
        image, target = fixed_sample(Shades(20), index)
        pair = (int(target.argmax()), int(image.float().mean((1, 2)).argmax()))
        expected[pair] = expected.get(pair, 0) + 1
    assert results.confusions is not None
    found = {(label, guess): images for label, guess, images in results.confusions}
    assert found == {pair: n for pair, n in expected.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_in_the_mode_that_it_was_in(config: Config, training: bool) -> None:
    model = Colours().train(training)
    evaluate(model, data(3), config, device=CPU)
    assert model.training is training


def test_a_progress_bar_is_told_the_number_of_batches(config: Config) -> None:
    totals = []

    def progress(batches: Any, *, total: int) -> Any:
        totals.append(total)
        return batches

    evaluate(Colours(), data(20), config, device=CPU, progress=progress)
    assert totals == [4]


def test_scores_that_are_not_finite_are_refused(config: Config) -> None:
    class Broken(Colours):
        def forward(self, images: Tensor, queries: Tensor | None) -> Tensor:
            return super().forward(images, queries) * torch.nan

    with pytest.raises(DataError, match="not finite"):
        evaluate(Broken(), data(3), config, device=CPU)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("auto", torch.float32)],
)
def test_the_precision_is_that_of_the_config(
    config: Config, precision: str, dtype: torch.dtype
) -> None:
    seen = []

    class Linear(Colours):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, images: Tensor, queries: Tensor | None) -> Tensor:
            logits = self.fc(images.float().mean((2, 3)))
            seen.append(logits.dtype)
            return logits

    evaluate(Linear(), data(3), override(config, [f"train.precision={precision}"]), device=CPU)
    assert seen == [dtype]
    with autocast(CPU, Precision(precision)):
        assert Linear().fc(torch.ones(1, 3)).dtype == dtype


def results(bad: list[str], images: int = 1200) -> Results:
    return Results({"mAP": 50.0}, {}, images, bad, None)


def test_images_that_were_left_out_are_one_line() -> None:
    assert left_out(results([])) == []
    assert left_out(results(["a", "b"])) == ["2 validation images are left out, 1,200 count: a; b"]
    (line,) = left_out(results([f"image {number}" for number in range(11)]))
    assert line.endswith("image 8; image 9; ...")


def test_advice_names_what_was_tried_and_what_needs_less(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.batch_size=64", "train.accumulate=4", "train.eval_batch_size=48"]
    config = override(config, words)
    assert memory_advice(config, CPU) == (
        "out of memory on cpu: 16 training images at a time on each process, 48 in evaluation, "
        "at 64 pixels; for the same batch in smaller pieces pass train.accumulate=8; "
        "train.eval_batch_size and data.image_size help too"
    )
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    assert "8 training images at a time on each process" in memory_advice(config, CPU)


@pytest.mark.parametrize(
    ("precision", "half"), [("fp32", True), ("bf16", False), ("auto", False), ("fp16", False)]
)
def test_on_cuda_the_advice_names_the_peak_and_half_precision(
    config: Config, precision: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB // 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 8 * GIB))
    config = override(config, [f"train.precision={precision}"])
    message = memory_advice(config, torch.device("cuda:1"))
    assert message.startswith("out of memory on cuda:1: ")
    assert "at 64 pixels, 1.5 GiB of 8.0 at the peak; " in message
    assert ("train.precision=bf16, train.eval_batch_size" in message) == half
