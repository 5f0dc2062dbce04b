"""The event file of a run, which TensorBoard reads."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from mldec.errors import writing
from mldec.training.details import Details

JPEG_QUALITY = 90


class EventFile:
    """Write scalars, images, curves and histograms for TensorBoard, in the thread that calls.

    torch's SummaryWriter has a thread of its own: on a full disk that thread prints a traceback and
    ends, and the training loop learns of it late or never.

    Args:
        folder: of the event files; each start of a run adds one.
        purge_step: TensorBoard drops what earlier files hold for this step and later ones.

    Raises:
        DataError: if the file cannot be written; likewise from `add` and `add_details`.
    """

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # slow to import

        # The name that torch's SummaryWriter would give the file.
        started = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / f"events.out.tfevents.{started}.0"

        # The first event names the format, the second one purges.
        session = SessionLog(status=SessionLog.START)
        self._write(
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=purge_step, session_log=session),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add_summaries(step, Summary(value=scalars))

    def add_details(self, step: int, details: Details) -> None:
        """Write what the evaluation after a step shows beside its metrics."""
        from torch.utils.tensorboard import summary

        histograms = [
            summary.histogram_raw(
                tag,
                min=histogram.lowest,
                max=histogram.highest,
                num=histogram.counts.sum(),
                sum=histogram.total,
                sum_squares=histogram.squares,
                bucket_limits=histogram.edges[1:].tolist(),
                bucket_counts=histogram.counts.tolist(),
            )
            for tag, histogram in details.histograms.items()
        ]
        curves = [
            summary.pr_curve_raw(tag, *curve, num_thresholds=len(curve.precision))
            for tag, curve in details.curves.items()
        ]
        images = [_image(tag, image) for tag, image in details.images.items()]

        self.add(step, details.scalars)
        self._add_summaries(step, *histograms, *curves, *images)

    def _add_summaries(self, step: int, *summaries: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._write(
            *(Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries)
        )

    def _write(self, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        with writing(self.path, of_run=True):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                for event in events:
                    RecordWriter(file).write(event.SerializeToString())


def _image(tag: str, image: Image.Image) -> Any:
    """Return an image as a summary of TensorBoard: a JPEG, a tenth of the size of a PNG."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = io.BytesIO()
    image.save(content, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    encoded = Summary.Image(
        height=image.height,
        width=image.width,
        colorspace=3,
        encoded_image_string=content.getvalue(),
    )
    return Summary(value=[Summary.Value(tag=tag, image=encoded)])
