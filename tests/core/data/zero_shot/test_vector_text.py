"""Text files of word vectors, through `read_vectors`."""

import logging

import numpy as np
import pytest
import torch

from mldec.data.word_vectors import read_vectors
from mldec.errors import DataError

NAMES = ["sky", "dog", "sea"]
ARRAY = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def lines(array=ARRAY, names=NAMES):
    return [
        f"{name} {' '.join(map(str, row.tolist()))}" for name, row in zip(names, array, strict=True)
    ]


def fault(*arguments, **named):
    with pytest.raises(DataError) as caught:
        read_vectors(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    assert "see DATASETS.md, section Word vectors" in message
    return message


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(lines()),
        "3 4\n" + "\n".join(lines()) + "\n",
        "\r\n".join(line + " " for line in lines()) + "\r\n",
        "\n".join(lines()).replace(" ", "\t"),
    ],
    ids=["glove", "word2vec", "blanks at the end", "tabs"],
)
def test_text_in_every_dialect(save, text):
    found = read_vectors(save("v.vec", text), ["sea", "sky"])
    assert found.dtype == torch.float32
    assert found.tolist() == ARRAY[[2, 0]].tolist()


@pytest.mark.parametrize(
    "entry", ["traffic light", "traffic_light", "traffic-light", "Traffic_light".lower()]
)
def test_an_entry_of_several_words_comes_before_the_mean(save, entry, caplog):
    path = save("v.txt", "\n".join(lines(names=["traffic", "light", entry])))
    assert read_vectors(path, ["Traffic light"]).tolist() == ARRAY[[2]].tolist()
    assert caplog.text == ""


def test_the_mean_of_the_words_is_reported(save, caplog):
    path = save("v.txt", "\n".join(lines(names=["traffic", "light", "dog"])))
    found = read_vectors(path, ["dog", "traffic light"])
    assert found.tolist() == [ARRAY[2].tolist(), ARRAY[:2].mean(0).tolist()]
    assert "the mean of their words' vectors serves traffic light" in caplog.text
    assert "1 of 1 names have no vector: stop light" in fault(path, ["stop light"])


def test_the_first_of_several_lines_counts(save, caplog):
    path = save("v.txt", "\n".join([*lines(), "dog 9 9 9 9"]))
    assert read_vectors(path, ["dog"]).tolist() == ARRAY[[1]].tolist()
    assert "the first line counts of the words that have several: dog" in caplog.text


def test_words_that_only_begin_like_a_wanted_one(save):
    path = save("v.txt", "\n".join(lines(names=["dog house", "dog", "dog."])))
    assert read_vectors(path, ["dog"]).tolist() == ARRAY[[1]].tolist()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("dog 0.1 0.2", "line 2: 2 numbers where the file has 4"),
        ("dog 0.1 0.2 0.3 0.4 0.5", "line 2: 5 numbers where"),
    ],
)
def test_widths_that_differ(save, line, text):
    assert text in fault(save("v.txt", f"sky 0.1 0.2 0.3 0.4\n{line}\n"), ["dog"])


def test_numbers_that_are_none(save):
    assert "line 2: could not convert" in fault(save("v.txt", "sky 1 2 3\ndog 1 x 3\n"), ["dog"])
    assert "is all zeros" in fault(save("v.txt", "sky 1 2 3\ndog 0 0 0\n"), ["dog"])
    assert "NaN" in fault(save("v.txt", "sky 1 2 3\ndog 0 nan 0\n"), ["dog"])


@pytest.mark.parametrize("content", ["", "hello\n", "<html>\n", b"\x1f\x8b\0\0\xff 1 2 3"])
def test_a_file_that_is_no_text_of_vectors(save, content):
    assert "is not a text file with a word and its numbers" in fault(
        save("v.txt", content), ["dog"]
    )


def test_words_that_are_not_utf_8_and_names_that_are_not_ascii(save):
    path = save(
        "v.txt",
        "\n".join(lines(names=["sky", "caf\u00e9", "x"])).encode() + b"\n\xff\xfe 1 2 3 4\n",
    )
    assert read_vectors(path, ["caf\u00e9"]).tolist() == ARRAY[[1]].tolist()


def test_the_log_is_quiet_on_a_plain_file(save, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        read_vectors(save("v.txt", "\n".join(lines())), NAMES)
    assert caplog.text == ""


@pytest.mark.parametrize("width", ["9" * 5000, "9" * 10, "0"])
def test_a_header_that_claims_a_width_of_thousands_of_digits(save, width):
    assert "is not a text file with a word and its numbers" in fault(
        save("v.txt", f"3 {width}\nsky 1 2\n"), ["sky"]
    )
