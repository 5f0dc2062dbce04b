"""Thresholds from tables."""

import pandas
import pytest

from mldec.checkpoint.thresholds import with_thresholds
from mldec.data.types import Classes
from mldec.errors import DataError

CLASSES = Classes(("hot dog", "7"))


@pytest.mark.parametrize("suffix", ["csv", "xlsx", "parquet", "jsonl"])
def test_names_are_compared_as_in_tables_of_labels(tmp_path, suffix):
    names = [7, 8] if suffix == "parquet" else ["hot dog ", 7]
    frame = pandas.DataFrame({"class": names, "threshold": [0.25, 0.75]})
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "xlsx":
        pytest.importorskip("openpyxl")
        frame.to_excel(path, index=False)
    elif suffix == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True)
    classes = Classes(("7", "8")) if suffix == "parquet" else CLASSES
    assert with_thresholds(path, classes, "raw").thresholds == pytest.approx((0.25, 0.75))


def test_class_is_listed_once(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("class,threshold\nhot dog,0.2\n7,0.3\n7,0.4\n")
    with pytest.raises(DataError, match="'7'"):
        with_thresholds(path, CLASSES, "raw")
