"""Progress bars in the kernel of a notebook."""

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")

CODE = """
import time
from mldec.runtime.console import log, progress_bar, to_console
to_console()
for count, seconds in ((1, 1.5), (3, 0), (6, 0.4)):
    for _ in progress_bar(range(count), desc=f"bar of {count}"):
        time.sleep(seconds)
log.info("end")
"""


def test_bars_are_widgets_and_short_bars_are_not_shown():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    widget, message = notebook.cells[0].outputs
    assert "application/vnd.jupyter.widget-view+json" in widget["data"]
    assert "bar of 6" in widget["data"]["text/plain"]
    assert message["text"] == "end\n"
