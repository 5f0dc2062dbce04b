"""Run commands of mldec and scripts/benchmark.py in this process, and print their results.

Argument: a JSON list of commands, such as [["predict", "best.pt", "photo.jpg"]]. A demo gets one
request, and then a signal stops it.
"""

import importlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import urllib.request
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

from null_gpu import counted, finish, truths

from mldec.__main__ import module_of


def run(name, *words):
    """Run a command, and return its status, output and counts."""
    sys.argv = [f"mldec {name}"] + list(words)
    out = io.StringIO()
    err = io.StringIO()
    status = 0
    # The benchmark is a script of the checkout.
    module = name if name == "benchmark" else module_of(name)
    # Predict reads from the device whether scores are finite.
    values = truths() if name == "predict" else nullcontext()
    with values, counted() as counts, redirect_stdout(out), redirect_stderr(err):
        if name == "demo":
            threading.Thread(target=send_photo, args=(out,), daemon=True).start()
        try:
            importlib.import_module(module).main()
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            status = "traceback"
            traceback.print_exc()
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "counts": counts}


def send_photo(out):
    """Send a photo to the demo, print the response, and stop the demo."""
    address = None
    deadline = time.monotonic() + 60
    while address is None and time.monotonic() < deadline:
        time.sleep(0.05)
        address = re.search(r"http://[0-9.]+:[0-9]+", out.getvalue())

    try:
        photo = Path("photos/0.png").read_bytes()
        head = 'Content-Disposition: form-data; name="photos"; filename="0.png"'
        body = f"--x\r\n{head}\r\nContent-Type: image/png\r\n\r\n".encode() + photo
        body += b'\r\n--x\r\nContent-Disposition: form-data; name="heat_maps"\r\n\r\ntrue'
        request = urllib.request.Request(
            f"{address[0]}/api/predict",
            data=body + b"\r\n--x--\r\n",
            headers={"Content-Type": "multipart/form-data; boundary=x"},
        )
        out.write(urllib.request.urlopen(request, timeout=60).read().decode())
    except Exception as error:
        out.write(f"no answer: {error!r}")
    os.kill(os.getpid(), signal.SIGINT)


finish([run(*command) for command in json.loads(sys.argv[1])])
