"""Messages and progress bars on a terminal."""

import logging
import sys

from tqdm import tqdm

from mldec.errors import printable, writing
from mldec.runtime import distributed

log = logging.getLogger("mldec")


def to_console() -> None:
    """Send the package's messages to standard output, above a progress bar; warnings only on other ranks."""
    log.setLevel(logging.INFO if distributed.is_main() else logging.WARNING)
    if not any(isinstance(handler, _Console) for handler in log.handlers):
        log.addHandler(_Console())


class _Console(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with writing("standard output"):
            tqdm.write(printable(self.format(record)), file=sys.stdout)
            sys.stdout.flush()


def on_terminal() -> bool:
    """Tell whether a person is watching."""
    return sys.stderr.isatty()
