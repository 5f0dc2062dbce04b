"""The page of suspected labels, as a browser shows it."""

from pathlib import Path

import pytest
from browser import opened
from PIL import Image

from mldec.check_data.label_errors import Suspect, page


@pytest.mark.parametrize(("width", "columns"), [(400, 2), (1600, 8)])
def test_a_browser_shows_all_pictures_side_by_side(
    tmp_path: Path, width: int, columns: int
) -> None:
    long_name = f"{'a_very_long_folder_' * 20}/photo.jpg"
    picture = Image.new("RGB", (300, 200), (200, 0, 0))
    pairs = [
        (Suspect(rank, long_name, "dog", True, 0.12345, suspected=rank == 1), picture)
        for rank in range(1, 21)
    ]
    file = tmp_path / "page.html"
    file.write_text(page("Twenty pairs", {"All": pairs}), encoding="utf-8")

    with opened(file, width=width) as browser:
        pictures = browser.find_elements("tag name", "img")
        assert {picture.get_property("naturalWidth") for picture in pictures} == {240}
        assert sum(picture.location["y"] == pictures[0].location["y"] for picture in pictures) == (
            columns
        )

        # Nothing is wider than the window, and nothing went wrong.
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []
