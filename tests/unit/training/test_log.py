"""The files of a run's log: whole after a resume, and named when the disk is full."""

import json
import logging
import math
from contextlib import closing

import pytest

from mldec.errors import DataError
from mldec.training.log import RunLog

# TensorBoard's thread prints a traceback of its own.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def line(step, **values):
    return json.dumps({"step": step, "epoch": 0, "time": 0.5, **values}) + "\n"


WHOLE = [line(step, loss=step / 10) for step in range(1, 7)]


@pytest.mark.parametrize(
    ("content", "left", "missing"),
    [
        ("".join(WHOLE).encode(), WHOLE[:4], 0),
        ("".join([*WHOLE[:4], WHOLE[4][:9]]).encode(), WHOLE[:4], 0),
        ("".join([*WHOLE[:3], WHOLE[3][:9]]).encode(), WHOLE[:3], 1),  # cut in a line
        (None, [], 4),
    ],
)
def test_a_damaged_log_is_mended_and_named(content, left, missing, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    log = RunLog(tmp_path, step=4, lines=4)
    log.scalars(5, 0, {"val/x": math.nan})
    log.close()

    written = path.read_text().splitlines(keepends=True)
    assert (written[:-1], log.lines) == (left, len(left))
    assert json.loads(written[-1])["val/x"] is None, "JSON has no NaN"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (missing > 0)
    if missing:
        said = f"metrics.jsonl: {missing} of 4 lines are missing"
        assert said in warnings[0]


def test_messages_from_before_the_log_was_open_come_first(tmp_path):
    messages = logging.getLogger("mldec")
    records = [
        messages.makeRecord(messages.name, logging.INFO, "f", 1, text, (), None) for text in "ab"
    ]
    with closing(RunLog(tmp_path, earlier=records)):
        messages.warning("c")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line[-1] for line in lines] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "tensorboard"])
def test_a_full_disk_is_named(name, tmp_path):
    path = tmp_path / name
    if name == "train.log":
        path.symlink_to("/dev/full")
    log = RunLog(tmp_path)
    log.scalars(1, 0, {"loss": 0.5})
    if name == "tensorboard":
        (path,) = path.iterdir()
    if name != "train.log":
        path.unlink()
        path.symlink_to("/dev/full")
    fault = rf"cannot write .*{name}.*: No space left on device; free space, .*resume=auto"
    with pytest.raises(DataError, match=fault):
        write_something(log)


def write_something(log):
    with closing(log):
        for step in (5, 6):  # the thread of TensorBoard may notice a step late
            log.scalars(step, 0, {"loss": 0.5})
        logging.getLogger("mldec").warning("one line")


def test_messages_are_lines_of_a_file_in_any_script(tmp_path):
    log = RunLog(tmp_path)
    logging.getLogger("mldec").warning("Stra\u00dfe \u65e5 \udcff.png")
    log.close()
    logging.getLogger("mldec").warning("after the run")
    text = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert text.endswith("] Stra\u00dfe \u65e5 \\udcff.png\n")
    assert text.count("\n") == 1
