"""Log messages and progress bars on a terminal."""

import logging
import os
import sys

from tqdm import tqdm

from mldec.errors import printable, writing

log = logging.getLogger("mldec")


def to_console() -> None:
    """Send messages to standard output, above a progress bar; those of other ranks if they warn."""
    # As torchrun says it: asking torch would import it.
    is_main = os.environ.get("RANK", "0") == "0"
    log.setLevel(logging.INFO if is_main else logging.WARNING)

    # A second command in one process, as in a notebook, begins as the first did.
    _CONSOLE.to_error = False
    log.addHandler(_CONSOLE)


def keep_output_clean() -> None:
    """Send messages to standard error instead: standard output is for a program."""
    _CONSOLE.to_error = True


class _Console(logging.Handler):
    """Print messages without control characters, and without breaking a progress bar."""

    to_error = False

    def emit(self, record: logging.LogRecord) -> None:
        stream, name = sys.stdout, "standard output"
        if self.to_error:
            stream, name = sys.stderr, "standard error"
        with writing(name):
            tqdm.write(printable(self.format(record)), file=stream)
            stream.flush()


# One handler per process: logging adds the same one once, and messages are never doubled.
_CONSOLE = _Console()


def on_terminal() -> bool:
    """Tell whether a progress bar has a reader: standard error is a terminal."""
    return sys.stderr.isatty()
