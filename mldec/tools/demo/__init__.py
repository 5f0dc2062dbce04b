"""Show what a model answers on a web page: `mldec demo best.pt`, or `model.onnx`.

The page is for this machine alone unless --host says otherwise, and Ctrl-C ends it. The same
answers come as JSON over HTTP: docs/demo.md.
"""

import argparse
import logging
import os
import socket
from ipaddress import ip_address

from mldec.cli import (
    add_model_options,
    add_precision_option,
    command,
    require,
    run_command,
    whole,
)
from mldec.errors import ConfigError, Stopped, brief, print_error, say

HOST, PORT = "127.0.0.1", 7860
MAX_PORT = 65535
MAX_CONNECTIONS = 64  # those that a browser keeps open count too
GRACE = 3  # seconds for requests that are being answered after a signal


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec demo`."""
    arguments = command("demo", str(__doc__))
    add_model_options(arguments, exported=True)

    arguments.add_argument(
        "--vectors",
        metavar="FILE|clip:MODEL",
        help="word vectors of the classes that are typed into the page, for a zero-shot model, or "
        "a text encoder; default: the text encoder of the training; see DATASETS.md, Word vectors",
    )
    arguments.add_argument(
        "--port", type=whole, default=PORT, help=f"of the page; 0 takes a free one; default: {PORT}"
    )
    arguments.add_argument(
        "--host",
        default=HOST,
        help=f"address to listen on; default: {HOST}, which only this machine reaches; "
        f"0.0.0.0 is every network of this machine",
    )
    arguments.add_argument(
        "--token",
        type=token,
        metavar="TEXT",
        help="ask for this password before anything is answered; the user name may be any",
    )
    arguments.add_argument(
        "--device", default="auto", help="of a checkpoint: auto, cpu, cuda or cuda:<number>"
    )
    add_precision_option(arguments, "that of the training if it is fp16 or bf16, else auto")
    return arguments


def token(text: str) -> str:
    """Read a password; an empty one would let everybody in."""
    if not text.strip():
        raise argparse.ArgumentTypeError("pass a text that is not empty")
    return text


def serve(args: argparse.Namespace) -> None:
    """Serve the page of the command line until a signal comes."""
    require("the web page", "demo", "fastapi", "uvicorn", "python_multipart")
    os.environ["OTEL_SDK_DISABLED"] = "true"  # FastAPI would send its measurements elsewhere

    # Imported late: --help and a wrong argument need not wait for torch.
    import uvicorn

    from mldec.runtime.signals import listening
    from mldec.tools.demo.app import Answerer, application
    from mldec.tools.predict.engine import EngineOptions, open_engine

    # The model is loaded only once the port is ours.
    with listener(args.host, args.port) as server:
        engine = open_engine(EngineOptions.of(vars(args)), typed_classes=True)
        app = application(Answerer(engine, args.vectors), [args.host], args.token)
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            ws="none",
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE,
        )
        page = uvicorn.Server(config)
        # Requests that are cut off at the end are no errors.
        logging.getLogger("uvicorn.error").addFilter(lambda record: not page.should_exit)

        announce(args, server)
        # uvicorn ends in order at a signal, and then raises it again for us.
        with listening() as stop:
            page.run(sockets=[server])
    raise Stopped(f"stopped by {stop.name}", stop.status)


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address, or a name of this machine; port 0 is free."""
    # The system would listen on the remainder of a larger number.
    if port > MAX_PORT:
        raise ConfigError(f"--port {port}: there is no such port; pass one up to {MAX_PORT}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, ValueError, OverflowError) as error:  # of a name such as ".", of a port
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({brief(error)}); pass another "
            f"--port, or an address of this machine"
        ) from error


def announce(args: argparse.Namespace, server: socket.socket) -> None:
    """Say where the page is, and who can reach it."""
    address, port = server.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    if ip_address(address).is_loopback:
        say(f"{url}: only this machine can reach it; Ctrl-C ends it")
        return

    risk = "can use the page, without a password and unencrypted; pass --token TEXT for a password"
    if args.token is not None:
        risk = "and knows the token can use the page; token and photos are sent unencrypted"
    print_error(f"--host {args.host}: anyone who reaches port {port} of this machine {risk}")
    say(f"{url}: Ctrl-C ends it")


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, serve)
