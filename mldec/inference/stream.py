"""Rows that are written as they come: to standard output, a pipe or a device."""

from mldec.files.results import ResultFile
from mldec.inference.formats import Text
from mldec.inference.rows import Row


class Stream:
    """Rows of text that are written to standard output or a device as they come.

    Args:
        target: "-" for standard output, or the path of a device or a pipe.
        text: the format.
    """

    def __init__(self, target: str, text: Text) -> None:
        self._file = ResultFile(target)
        self._text = text
        self._rows = 0

    def add(self, row: Row) -> None:
        """Write a row at once.

        Raises:
            DataError: if it cannot be written.
        """
        before = self._text.between if self._rows else self._text.opening
        self._file.write(before + self._text.encode(row), flush=True)
        self._rows += 1

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        # A list is completed however the work ends; after a write that failed the file is closed.
        if self._file.stream is not None:
            opening = "" if self._rows else self._text.opening
            self._file.write(opening + self._text.closing)
            self._file.commit()
