"""Log messages and progress bars on a terminal."""

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

from mldec.errors import printable, writing

log = logging.getLogger("mldec")


def to_console() -> None:
    """Log to standard output, above a progress bar. Other ranks than 0 log only warnings."""
    # Read the environment variable of torchrun, because torch may not be imported yet.
    is_main = os.environ.get("RANK", "0") == "0"
    log.setLevel(logging.INFO if is_main else logging.WARNING)

    # Reset the stream for a second command in the same process, as in a notebook.
    _CONSOLE.to_error = False
    log.addHandler(_CONSOLE)


def keep_output_clean() -> None:
    """Log to standard error, because another program reads standard output."""
    _CONSOLE.to_error = True


class _Console(logging.Handler):
    """Print messages without control characters, above a progress bar."""

    to_error = False

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout
        name = "standard output"
        if self.to_error:
            stream = sys.stderr
            name = "standard error"
        with writing(name):
            tqdm.write(printable(self.format(record)), file=stream)
            stream.flush()


# One handler per process. `addHandler` ignores a handler that was added before.
_CONSOLE = _Console()


def progress_bar(
    items: Iterable[Any] | None = None, *, hidden: bool = False, **options: Any
) -> "tqdm[Any]":
    """Return a progress bar, which is visible on a terminal and in a notebook unless `hidden`.

    `options` are arguments of tqdm.
    """
    # None hides the bar if the output is not a terminal. The output of a notebook never is.
    disable = None
    if hidden:
        disable = True
    elif in_notebook():
        disable = False
        # Notebooks separate standard error from the messages on standard output.
        options["file"] = sys.stdout
    return tqdm(items, leave=False, disable=disable, **options)


def in_notebook() -> bool:
    """Return True in the kernel of a notebook."""
    return "ipykernel" in sys.modules


def on_terminal() -> bool:
    """Return True if standard error, which shows progress bars, is a terminal."""
    return sys.stderr.isatty()
