"""The table of runs, as text and as CSV."""

import csv
import io

from mldec.summary import COLUMNS, Run, table, to_csv
from mldec.training.log import Progress


def test_control_characters_do_not_reach_the_terminal() -> None:
    run = Run(
        "a\x1b[2J",
        "x",
        "mAP",
        1.0,
        "raw",
        1.0,
        1.0,
        64,
        "1/1",
        "finished",
        "0:00:01",
        "-",
        Progress(),
    )
    assert "\x1b" not in table([run])


def test_the_progress_of_a_run_is_no_column() -> None:
    run = Run(
        "a", "x", None, None, "raw", 1.0, 0.5, 64, "1/1", "finished", "0:00:01", "-", Progress()
    )
    heading, row = csv.reader(io.StringIO(to_csv([run])))
    assert heading == table([run]).splitlines()[0].split() == COLUMNS
    assert COLUMNS[:4] == ["run", "name", "metric", "value"]
    assert COLUMNS[-2:] == ["time", "commit"]
    assert (row[0], row[2], row[-1], len(row)) == ("a", "", "-", 12)
