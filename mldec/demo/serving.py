"""Serve the web page: the work of the command `mldec.demo`."""

import argparse
import errno
import importlib.util
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mldec.checkpoint import load_model
from mldec.checkpoint.classes import can_make
from mldec.cli import chosen_model
from mldec.data.base import Classes
from mldec.data.zero_shot.word_vectors import word_vectors
from mldec.demo.answering import Answerer, Answers, Photo
from mldec.demo.door import Door
from mldec.demo.shelf import Shelf
from mldec.errors import CheckpointError, ConfigError, Stopped, complain, say
from mldec.exported.metadata import read_metadata
from mldec.inference.engine import (
    Engine,
    ExportedEngine,
    TorchEngine,
    check_exported_options,
    is_exported,
)
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.runtime.signals import StopRequest, listening

MiB = 2**20
UPLOADED = 512 * MiB  # photos that wait to be answered
WAITING = 600.0  # seconds that a photo may wait
KEPT = 256 * MiB  # answers of open pages
OPEN = 1800.0  # seconds that an answer is kept for another threshold
CONNECTIONS = 512
GRACE = 3  # seconds for open connections after a signal

# Gradio reads them while it is imported.
ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OTEL_SDK_DISABLED": "true",  # of FastAPI
}


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.demo`: load the model, and serve the page until a signal comes.

    Args:
        args: the command line; see `mldec.demo.parser`.

    Raises:
        Stopped: after a signal.
        UserError: for a wrong option, or a model that cannot be used.
    """
    # Everything that can be refused at once comes before the model.
    require_gradio()
    with ExitStack() as stack:
        listening_socket = stack.enter_context(listener(args.host, args.port))
        answerer = Answerer(open_engine(args), args.vectors)
        uploads: Shelf[Photo] = Shelf(UPLOADED, WAITING)
        kept: Shelf[Answers] = Shelf(KEPT, OPEN)

        # Gradio makes folders there, which stay empty: photos never reach the disk.
        folder = stack.enter_context(TemporaryDirectory(prefix="mldec-demo-"))
        os.environ |= {**ENVIRONMENT, "GRADIO_TEMP_DIR": folder}
        from mldec.demo.page import application

        name = Path(args.checkpoint).name
        app = application(answerer, uploads, kept, f"{name}: what photos show")
        address = listening_socket.getsockname()[0]
        is_local = ipaddress.ip_address(address).is_loopback
        door = Door(app, uploads, {"localhost", address, args.host} if is_local else None)

        announce(args, listening_socket, is_local)
        with listening() as stop:
            serve(door, listening_socket, stop, [uploads, kept])
        raise Stopped(f"stopped by {stop.name}", stop.status)


def require_gradio() -> None:
    """Raise a `ConfigError` if Gradio is not installed."""
    # A folder of this name, such as Gradio's own in /tmp, is no package.
    spec = importlib.util.find_spec("gradio")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the web page needs gradio, which is not installed; run pip install 'mldec[demo]'"
        )


def open_engine(args: argparse.Namespace) -> Engine:
    """Open the checkpoint or the exported file of the command line.

    Raises:
        UserError: if it cannot be used, or an option has no effect on it.
    """
    if not is_exported(args.checkpoint):
        device = distributed.pick_device(args.device)
        loaded = load_model(**chosen_model(args), device=device)
        distributed.prepare_device(device, tf32=loaded.config.train.tf32)
        engine: Engine = TorchEngine(loaded, Precision(args.precision or "auto"))
        if not loaded.classes.names and loaded.classes.queries is None:
            raise CheckpointError(f"{args.checkpoint} names no classes: pass --class-names FILE")
        if not (loaded.classes.names or args.vectors or can_make(loaded.classes)):
            raise CheckpointError(f"{args.checkpoint} names no classes: pass --vectors FILE")
    else:
        engine = _exported(args)

    if args.vectors is not None and not engine.zero_shot:
        raise ConfigError(
            f"--vectors has no effect: {args.checkpoint} knows its own classes only; leave it out"
        )
    return engine


def _exported(args: argparse.Namespace) -> ExportedEngine:
    """Open an exported file, with the classes of its training if it asks for word vectors."""
    check_exported_options(args)
    path = Path(args.checkpoint)
    metadata = read_metadata(path)
    if metadata.word_dim is None:
        return ExportedEngine(path)
    if args.vectors is None:
        raise CheckpointError(f"{path} asks for word vectors: pass --vectors FILE")

    names = tuple(metadata.classes)
    return ExportedEngine(path, Classes(names, queries=word_vectors(args.vectors, names).queries))


@contextmanager
def listener(host: str, port: int) -> Iterator[socket.socket]:
    """Return a socket that listens; the model is loaded only once the port is ours.

    Args:
        host: an address, or a name of this machine.
        port: 0 for a free one.

    Raises:
        ConfigError: if it cannot listen there.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(address[:2], family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ConfigError(_listening_fault(host, port, error)) from error
    with server:
        yield server


def _listening_fault(host: str, port: int, error: OSError) -> str:
    """Describe why the server cannot listen, and what helps."""
    if error.errno == errno.EADDRINUSE:
        return f"--port {port} is in use on {host}; pass another one, such as --port {port + 1}"
    if error.errno == errno.EACCES:
        return f"--port {port} needs more rights; pass one from 1024 on"
    reason = str(error.strerror).partition(" (")[0]
    return f"--host {host} is no address of this machine ({reason}); pass 127.0.0.1"


def announce(args: argparse.Namespace, server: socket.socket, is_local: bool) -> None:
    """Say where the page is, and who can reach it."""
    address, port = server.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if is_local:
        say(f"http://{shown}:{port}: only this machine can reach it; Ctrl-C ends it")
        return

    complain(
        f"--host {args.host}: anyone who reaches port {port} of this machine can use the page, "
        f"without a password and unencrypted"
    )
    say(f"http://{shown}:{port}: Ctrl-C ends it")


def serve(
    door: Door,
    server: socket.socket,
    stop: StopRequest,
    shelves: list[Shelf[Photo] | Shelf[Answers]],
) -> None:
    """Answer requests until a signal comes.

    Args:
        door: the application.
        server: that listens.
        stop: becomes true after a signal.
        shelves: from which is dropped what has been kept for too long.
    """
    import uvicorn

    class Server(uvicorn.Server):
        """Let our own handlers take the signals."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def on_tick(self, counter: int) -> bool:
            for shelf in shelves:
                shelf.expire()
            if stop:
                # Requests that are cut off now are no errors.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            return bool(stop) or await super().on_tick(counter)

    config = uvicorn.Config(
        door,
        log_level="error",
        access_log=False,
        ws="none",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GRACE,
    )
    Server(config).run(sockets=[server])
