"""`mldec.fit` in the kernel of a notebook."""

import time

import pytest

pytest.importorskip("ipykernel")
jupyter_client = pytest.importorskip("jupyter_client")

SECONDS = 120
SETUP = """
import json
import mldec

SETTINGS = ["backbone=tiny", "data.image_size=32", "data.train_images=64", "data.val_images=16"]
SETTINGS += ["train.batch_size=16", "train.workers=0", "train.log_every=1", "device=cpu"]
"""


@pytest.fixture
def kernel(here):
    """A client of a kernel in a new folder, and a function that interrupts the kernel."""
    manager, client = jupyter_client.manager.start_new_kernel(cwd=here)
    yield client, manager.interrupt_kernel
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run_cell(client, code, meanwhile=lambda: None):
    """Run a cell and return its printed output. An error in the cell raises."""
    printed = []
    request = client.execute(code)
    meanwhile()
    reply = client.get_shell_msg(timeout=SECONDS)
    while reply["parent_header"].get("msg_id") != request:
        reply = client.get_shell_msg(timeout=SECONDS)

    while True:
        message = client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            printed.append((message["content"]["name"], message["content"]["text"]))
        if message["content"].get("execution_state") == "idle":
            break
    assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
    return printed


def test_interrupt_returns_the_run_and_resume_continues_it(kernel, here):
    client, interrupt = kernel
    log = here / "outputs" / "digits" / "metrics.jsonl"

    def interrupt_after_epoch():
        deadline = time.monotonic() + SECONDS
        while not log.exists() or '"epoch": 2' not in log.read_text():
            assert time.monotonic() < deadline
            assert not client.shell_channel.msg_ready(), "the cell has failed"
            time.sleep(0.1)
        interrupt()

    run_cell(client, SETUP)
    first = 'run = mldec.fit("digits", epochs=100_000, overrides=SETTINGS)'
    run_cell(client, first, interrupt_after_epoch)
    run_cell(client, "assert run.ended is None; assert run.best.epoch >= 1")
    steps = len(log.read_text().splitlines())

    # The same kernel continues the run from its last step.
    again = """
epoch = int(run.history["epoch"].max()) + 1
settings = [*SETTINGS, f"train.stop_epoch={epoch}"]
run = mldec.fit("digits", epochs=100_000, resume="auto", overrides=settings)
assert run.history["epoch"].max() == epoch
assert run.history["step"].tolist() == list(range(1, 4 * epoch + 1))
"""
    printed = run_cell(client, again)
    assert len(log.read_text().splitlines()) > steps
    assert "resumed from" in "".join(text for _, text in printed)
    # A bar on standard error would be a red box between the messages.
    assert {name for name, _ in printed} == {"stdout"}
