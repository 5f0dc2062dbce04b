"""Log messages and progress bars on a terminal."""

import io
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, redirect_stdout
from typing import Any

from tqdm.auto import tqdm

from mldec.errors import log, printable, writing

LOG_SECONDS = 30.0  # between two messages of a progress bar without a terminal


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


@contextmanager
def console_output(*, verbose: bool) -> Iterator[None]:
    """Unless `verbose`, print only warnings: no messages, progress bars and results."""
    if verbose:
        yield
        return

    _CONSOLE.setLevel(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        _CONSOLE.setLevel(logging.NOTSET)
        log.removeHandler(_CONSOLE)  # until the next command


class _Console(logging.Handler):
    """Print messages without control characters, above a progress bar."""

    to_error = False

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout
        name = "standard output"
        if self.to_error or self.level:
            stream = sys.stderr
            name = "standard error"
        with writing(name):
            tqdm.write(printable(self.format(record)), file=stream)
            stream.flush()


# One handler per process. `addHandler` ignores a handler that was added before.
_CONSOLE = _Console()


class _LogFile(io.StringIO):
    def write(self, text: str) -> int:
        if text.strip():
            log.info(text.strip())
        return len(text)


def progress_bar(
    items: Iterable[Any] | None = None, *, hidden: bool = False, **options: Any
) -> "tqdm[Any]":
    """Return a progress bar. Without a terminal, it logs position and remaining time instead.

    `hidden` disables it, and so does a total of one item. `options` are arguments of tqdm.
    """
    total = options.get("total", len(items) if isinstance(items, Sized) else None)
    hidden |= total == 1 or _CONSOLE.level > logging.INFO
    if in_notebook():
        # Notebooks separate standard error from the messages on standard output. A saved notebook
        # keeps a text line of each bar that was shown, so short bars are not shown.
        options |= {"file": sys.stdout, "delay": 1}
    elif on_terminal():
        # tqdm hides the bar on a terminal without a size, as in some containers.
        options["ncols"], options["nrows"] = shutil.get_terminal_size()
    else:
        options |= {"file": _LogFile(), "ncols": 0, "miniters": 1}
        options |= dict.fromkeys(("delay", "mininterval"), LOG_SECONDS)
    return tqdm(items, leave=False, disable=hidden, **options)


def in_notebook() -> bool:
    """Return True in the kernel of a notebook."""
    return "ipykernel" in sys.modules


def on_terminal() -> bool:
    """Return True if standard error, which shows progress bars, is a terminal."""
    return sys.stderr.isatty()
