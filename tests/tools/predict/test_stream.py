import json
import os
from pathlib import Path

import pytest

from mldec.errors import DataError
from mldec.predict.answers import Row
from mldec.predict.results import Stream, Text

LINES = Text(lambda row: f'{{"image": "{row.image}"}}\n')
LIST = Text(lambda row: f'"{row.image}"', "[\n", ",\n", "\n]\n")


def test_rows_are_there_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with Stream(str(tmp_path / "pipe"), LINES) as stream:
        for number in range(3):
            stream.add(Row(str(number)))
            assert os.read(reader, 99) == f'{{"image": "{number}"}}\n'.encode()
    os.close(reader)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_is_whole_however_the_work_ends(
    capsys: pytest.CaptureFixture[str], count: int
) -> None:
    def interrupted() -> None:
        with Stream("-", LIST) as stream:
            for number in range(count):
                stream.add(Row(str(number)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert json.loads(capsys.readouterr().out) == [str(number) for number in range(count)]


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_device_is_named(size: int) -> None:
    message = "cannot write /dev/full: No space left on device; free space"
    with pytest.raises(DataError, match=message), Stream("/dev/full", LINES) as stream:
        stream.add(Row("x" * size))
