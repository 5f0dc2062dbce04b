import json
import logging
import math
from contextlib import closing
from pathlib import Path

import pytest

from mldec.errors import DataError
from mldec.runtime.cli import to_console
from mldec.training.log import RunLog


def line(step: int, **values: float) -> str:
    return json.dumps({"step": step, "epoch": 0, "time": 0.5, **values}) + "\n"


WHOLE = [line(step, loss=step / 10) for step in range(1, 7)]


def resumed(folder: Path, content: bytes | None, lines: int = 4) -> tuple[list[str], int]:
    """Resume at step 4 with this metrics.jsonl, log one line, and return the lines of the file."""
    path = folder / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    log = RunLog(folder, step=4, lines=lines)
    log.scalars(5, 0, {"loss": 0.5})
    log.close()
    written = path.read_text().splitlines(keepends=True)
    assert all(json.loads(text) for text in written)
    assert not list(folder.glob("*.tmp"))
    return written[:-1], log.lines


@pytest.mark.parametrize(
    ("content", "left", "missing"),
    [
        ("".join(WHOLE).encode(), WHOLE[:4], 0),
        ("".join([*WHOLE[:4], WHOLE[4][:9]]).encode(), WHOLE[:4], 0),
        ("".join([*WHOLE[:3], WHOLE[3][:9]]).encode(), WHOLE[:3], 1),  # cut in a line
        ("".join(WHOLE[:4]).encode()[:-1], WHOLE[:3], 1),  # the last newline is lost
        (
            "".join([WHOLE[0], WHOLE[1][:9], *WHOLE[2:5]]).encode(),
            [WHOLE[0], WHOLE[3]],
            2,
        ),  # two melted into one
        (b"\xff\xfe" + "".join(WHOLE).encode(), WHOLE[1:4], 1),
        ("".join(WHOLE).encode("utf-16"), [], 4),
        (b"\0" * 100 + b"\n" + "".join(WHOLE[1:]).encode(), WHOLE[1:4], 1),
        (b"[" * 100_000 + b"\n" + "".join(WHOLE[1:]).encode(), WHOLE[1:4], 1),
        (b"[1]\n7\nnull\n" + "".join(WHOLE[3:]).encode(), WHOLE[3:4], 3),
        (b"", [], 4),
        (None, [], 4),
    ],
)
def test_a_damaged_log_is_mended_and_named(
    content: bytes | None,
    left: list[str],
    missing: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert resumed(tmp_path, content) == (left, len(left))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (missing > 0)
    if missing:
        assert (
            f"metrics.jsonl: {missing} of the 4 lines that the run had written are missing"
            in warnings[0]
        )


def test_a_log_that_is_right_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(WHOLE))
    before = path.stat()
    RunLog(tmp_path, step=6, lines=6).close()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("train.log", 0),
        ("train.log", 4),
        ("metrics.jsonl.tmp", 4),
    ],
)
def test_a_full_disk_at_the_start_is_named(name: str, step: int, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(WHOLE))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/full")
    stem = name.removesuffix(".tmp")
    fault = rf"cannot write .*{stem}.*No space left on device; free space, .*resume=auto"
    with pytest.raises(DataError, match=fault):
        write_something(RunLog(tmp_path, step=step, lines=step))
    logging.getLogger("mldec").warning("nobody writes this any more")
    if name != "train.log":
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(WHOLE)


# TensorBoard's thread prints a traceback of its own.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["train.log", "metrics.jsonl", "tensorboard"])
def test_a_full_disk_later_is_named(name: str, tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.scalars(1, 0, {"loss": 0.5})
    if name == "tensorboard":
        (events,) = (tmp_path / "tensorboard").iterdir()
        events.unlink()
        events.symlink_to("/dev/full")
    else:
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(
        DataError, match=rf"cannot write .*{name}.*: No space left on device; free space"
    ):
        write_something(log)


def write_something(log: RunLog) -> None:
    with closing(log):
        for step in (5, 6):  # the thread of TensorBoard may notice a step late
            log.scalars(step, 0, {"loss": 0.5})
        logging.getLogger("mldec").warning("one line")


def test_tensorboard_reads_what_was_written_and_forgets_what_came_after_a_resume(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.scalars(step, 0, {"loss": step / 4, "val/x": math.nan})
    log.close()
    log = RunLog(tmp_path, step=2, lines=2)
    log.scalars(3, 0, {"loss": 7.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 7.0),
    ]


def test_messages_are_lines_of_a_file_in_any_script(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    logging.getLogger("mldec").warning("Stra\u00dfe \u65e5 \udcff.png")
    log.close()
    logging.getLogger("mldec").warning("after the run")
    text = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert text.endswith("] Stra\u00dfe \u65e5 \\udcff.png\n")
    assert text.count("\n") == 1


def test_a_name_in_a_warning_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    to_console()
    logging.getLogger("mldec").warning("left out: x\x1b]0;pwn\x07.png\nmldec: all is well \udcff")
    assert capsys.readouterr().out == "left out: x?]0;pwn?.png mldec: all is well ?\n"
