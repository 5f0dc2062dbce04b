"""Serve a web page for photos: `mldec demo best.pt` or `mldec demo model.onnx`.

Only this machine can open the page, unless --host is given. Ctrl-C stops the server. The results
are also available as JSON over HTTP. See docs/demo.md.
"""

import argparse
import logging
import os
import socket
import sys
from ipaddress import ip_address

from mldec import cli
from mldec.errors import ConfigError, Stopped, brief, print_error, say
from mldec.evaluation.options import ModelOptions

HOST = "127.0.0.1"
PORT = 7860
MAX_CONNECTIONS = 64  # including idle connections of browsers
GRACE = 3  # seconds to finish open requests after a signal


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec demo`."""
    arguments = cli.command("demo", str(__doc__))
    cli.add_model_options(arguments, exported=True)
    add = arguments.add_argument
    cli.add_options(
        arguments,
        ModelOptions,
        "vectors",
        help="word vectors or text encoder for the classes that are typed into the page of a "
        "zero-shot model; default: the text encoder of the training; see DATASETS.md, Word vectors",
    )
    add("--examples", metavar="FOLDER", help="offer up to six photos below this folder to try")
    add(
        "--training-photos",
        metavar="FOLDER",
        help="show the training photos that speak most for a class: data.root of a run with "
        "head=ridge",
    )
    add("--port", type=cli.whole, default=PORT, help=f"0 selects a free port; default: {PORT}")
    add(
        "--host",
        default=HOST,
        help=f"address to listen on; 0.0.0.0 means all networks; default: {HOST}, which only this "
        "machine can reach",
    )
    cli.add_options(arguments, ModelOptions, "device", "precision", "engine")
    return arguments


def serve(args: argparse.Namespace) -> None:
    """Serve the page until a signal arrives."""
    cli.require("mldec demo", "demo", "fastapi", "uvicorn", "python_multipart")
    os.environ["OTEL_SDK_DISABLED"] = "true"  # disable the telemetry of FastAPI

    # Import late, because --help and argument errors do not need these slow modules.
    import uvicorn

    from mldec.runtime.signals import listening
    from mldec.tools.demo.app import Predictor, create_app
    from mldec.tools.demo.photos import TrainingPhotos, read_examples
    from mldec.tools.predict.engine import open_engine

    # Open the port before the model is loaded.
    with listener(args.host, args.port) as server:
        engine = open_engine(ModelOptions.of(vars(args)), typed_classes=True)
        predictor = Predictor(engine, args.vectors)
        if args.training_photos is not None:
            predictor.training = TrainingPhotos(engine, args.training_photos)
        examples = [] if args.examples is None else read_examples(args.examples)
        config = uvicorn.Config(
            create_app(predictor, args.host, examples),
            log_level="error",
            access_log=False,
            ws="none",
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
        page = uvicorn.Server(config)
        # Interrupted requests are not errors during shutdown.
        logging.getLogger("uvicorn.error").addFilter(lambda record: not page.should_exit)

        print_address(args.host, server)
        # Another program may read the address from a pipe.
        sys.stdout.flush()
        # uvicorn shuts down after a signal, and raises it again for our handler.
        with listening() as stop:
            page.run(sockets=[server])
    raise Stopped(f"stopped by {stop.name}", stop.status)


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address or a name of this machine."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # `getaddrinfo` wraps port numbers above 65535.
        return socket.create_server((address[0], port), family=family)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({brief(error)}); pass another "
            f"--port or an address of this machine"
        ) from error


def print_address(host: str, server: socket.socket) -> None:
    """Print the address of the page, and a warning if other machines can open it."""
    address, port = server.getsockname()[:2]
    is_loopback = ip_address(address).is_loopback
    if ":" in address:
        address = f"[{address}]"
    url = f"http://{address}:{port}"
    if is_loopback:
        say(f"{url}: only this machine can open the page; stop with Ctrl-C")
    else:
        print_error(
            f"--host {host}: other machines can open the page without a password and without "
            f"encryption; use a reverse proxy for both"
        )
        say(f"{url}: stop with Ctrl-C")


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_args, serve)
