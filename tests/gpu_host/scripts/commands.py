"""Run commands of mldec in this process, one after the other; print how each ended.

Argument: a JSON list of commands, each a list of words such as ["predict", "best.pt", "photo.jpg"].
The last command may be "demo", which is asked about a photo and stopped by a signal.
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

from null_gpu import counted, truths

from mldec.__main__ import module_of


def run(name, *words):
    """Run a command; return its status, what it prints, and its counts."""
    sys.argv = [f"mldec {name}", *words]
    out = io.StringIO()
    err = io.StringIO()
    status = 0
    # Predict asks the device whether scores are finite.
    reads = truths() if name == "predict" else nullcontext()
    with reads, counted() as counts, redirect_stdout(out), redirect_stderr(err):
        if name == "demo":
            threading.Thread(target=ask, args=(out,), daemon=True).start()
        try:
            importlib.import_module(module_of(name)).main()
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            status = "traceback"
            traceback.print_exc()
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "counts": counts}


def ask(out):
    """Send a photo to the demo once it listens, print its answer, and stop it."""
    deadline = time.monotonic() + 60
    while not (found := re.search(r"http://[0-9.]+:[0-9]+", out.getvalue())):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)

    try:
        photo = Path("photos/0.png").read_bytes()
        head = 'Content-Disposition: form-data; name="photos"; filename="0.png"'
        body = f"--x\r\n{head}\r\nContent-Type: image/png\r\n\r\n".encode() + photo
        body += b'\r\n--x\r\nContent-Disposition: form-data; name="heat_maps"\r\n\r\ntrue'
        request = urllib.request.Request(
            f"{found[0]}/api/predict",
            data=body + b"\r\n--x--\r\n",
            headers={"Content-Type": "multipart/form-data; boundary=x"},
        )
        out.write(urllib.request.urlopen(request, timeout=60).read().decode())
    except Exception as error:
        out.write(f"no answer: {error!r}")
    os.kill(os.getpid(), signal.SIGINT)


results = []
for command in json.loads(sys.argv[1]):
    start = time.perf_counter()
    results.append(run(*command))
    print(command[0], round(time.perf_counter() - start, 1), "s", file=sys.stderr)
print(json.dumps(results))
