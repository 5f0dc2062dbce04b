"""Train in float64 without batch norm, to compare one process with several.

Start it with `torchrun divided.py FOLDER [SETTING ...]`.
"""

import json
import sys
from pathlib import Path

import torch
from patches import Patches

from mldec.config.compose import compose
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.cli import to_console
from mldec.training.log import RunLog
from mldec.training.trainer import Trainer


class Noise:
    """Random images; two cannot be read."""

    def __len__(self) -> int:
        return 56  # so that four micro-batches share the last batch

    def load(self, index: int, rng: SampleRandom) -> tuple[torch.Tensor, torch.Tensor]:
        if index in (7, 30):
            raise DataError(f"image {index} is broken")
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 16, 16), dtype=torch.uint8, generator=generator)
        return image, torch.randint(2, (4,), dtype=torch.int8, generator=generator)

    def name(self, index: int) -> str:
        return f"image {index}"


def main(folder: Path, *settings: str) -> None:
    words = [
        "train.epochs=3",
        "train.stop_epoch=2",
        "train.ema_start_epoch=2",
        "train.batch_size=16",
        "train.workers=0",
        "train.log_every=1",
        "device=cpu",
        *settings,
    ]
    config = compose(["+experiment=digits", *words])
    device = torch.device("cpu")
    with distributed.processes(device):
        to_console()
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        head = MLDecoder(48, 4, embed_dim=16, num_heads=2, mlp_dim=16, dropout=0.0)
        split = Split(Noise(), Classes(("a", "b", "c", "d")))
        data = DataModule(
            lambda: split,
            lambda: split,
            lambda classes: MultiLabelEvaluator(len(classes), top_k=1),
            EvalTransform(image_size=16),
            "skip",
        )
        model = Classifier(Patches(), head).double()
        job = Trainer(
            config, model, AsymmetricLoss(), data, folder=folder / "checkpoints", device=device
        )
        log = RunLog(folder)
        metrics = job.fit(log)
        log.close()
        if distributed.is_main():
            outcome = {"bad_images": job.bad_images, "metrics": metrics}
            (folder / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
