"""Pictures of the images that are answered, with a heat map per class."""

from collections.abc import Sequence
from pathlib import Path

from mldec.checkpoint import Loaded
from mldec.explain import Explainer
from mldec.explain.pictures import Finding, Typeface, draw, file_name, save
from mldec.inference.decoding import read_item
from mldec.inference.inputs import Item
from mldec.inference.rows import Prediction
from mldec.runtime.facts import explain_out_of_memory


class Pictures:
    """Draw images and where the model looked, a file per image.

    Args:
        loaded: from `checkpoint.load_model`.
        folder: of the files; it is made with the first one.
        typeface: of the texts.

    Raises:
        ConfigError: if no heat maps can be made of this model.
    """

    def __init__(self, loaded: Loaded, folder: Path, typeface: Typeface) -> None:
        self._loaded = loaded
        self._folder = folder
        self._typeface = typeface
        self._device = next(loaded.model.parameters()).device
        size = loaded.transform.image_size
        self._advice = (
            f"out of memory on {self._device}: a heat map of one image of {size} pixels; "
            f"leave --pictures out"
        )
        with explain_out_of_memory(lambda: self._advice):
            self._explainer = Explainer(loaded.model, size, loaded.classes.queries)

    def add(self, item: Item, predictions: Sequence[Prediction]) -> Path:
        """Write the picture of an image.

        Args:
            item: the image.
            predictions: its classes.

        Returns:
            The path of the picture.

        Raises:
            DataError: if the image can no longer be read, or the picture not be written.
            OutOfMemoryError: if the heat maps need too much memory.
        """
        name = Path(item.name)
        image = read_item(item)
        transform = self._loaded.transform
        with explain_out_of_memory(lambda: self._advice):
            model_input = transform(image)[None].to(self._device)
            [heat] = self._explainer.maps(model_input, [[one.index for one in predictions]])

        # The maps cover what the model saw. Where it squeezed the image into a square, drawing
        # them over the image in its own proportions undoes that.
        seen = image.crop(transform.visible_part(image.size))
        findings = [
            Finding(prediction.name, prediction.score, class_heat.numpy())
            for prediction, class_heat in zip(predictions, heat, strict=True)
        ]
        sheet = draw(seen, name.name, findings, self._explainer.method, self._typeface)

        target = self._folder / file_name(name)
        save(sheet, target)
        return target
