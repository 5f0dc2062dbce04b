import sys
from pathlib import Path

import open_clip
import pytest

from mldec.data import text_encoder as prompts
from mldec.data.text_encoder import DEFAULT, read_templates
from mldec.errors import ConfigError, UserError


def test_one_sentence(tmp_path: Path) -> None:
    assert read_templates(DEFAULT, tmp_path) == ("a photo of a {}.",)
    assert read_templates("{}", tmp_path) == ("{}",)


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("clip80", open_clip.OPENAI_IMAGENET_TEMPLATES),
        ("simple7", open_clip.SIMPLE_IMAGENET_TEMPLATES),
    ],
)
def test_the_lists_of_clip(name: str, functions, tmp_path: Path) -> None:
    templates = read_templates(name, tmp_path)
    assert [template.replace("{}", "zebra") for template in templates] == [
        function("zebra") for function in functions
    ]
    assert len(templates) == int(name[-2:].lstrip("e"))


def test_the_lists_need_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.modules["open_clip"]
    monkeypatch.delitem(sys.modules, "open_clip")
    assert len(read_templates("clip80", tmp_path)) == 80
    assert "open_clip" not in sys.modules
    monkeypatch.setitem(sys.modules, "open_clip", before)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mldec\[text\]'$"):
        read_templates("clip80", tmp_path)


def test_a_file_beside_the_data(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a {}\n\nthe {} and the {}\n")
    assert read_templates("mine.txt", tmp_path) == ("a {}", "the {} and the {}")


@pytest.mark.parametrize(
    ("setting", "content", "message"),
    [
        ("a photo", None, "'a photo' has no {} for the name, and is neither a file nor a list"),
        ("clip8", None, "did you mean 'clip80'"),
        ("", None, "has no {}"),
        ("f.txt", "", "f.txt is empty"),
        ("f.txt", "a {}\na cat\n", "template 2, 'a cat', has no {}"),
        ("f.txt", "{}\n" * (prompts.MAX_TEMPLATES + 1), "more than 1,000"),
        ("{}" + "x" * prompts.MAX_LENGTH, None, "1,002 characters, more than 1,000"),
    ],
)
def test_templates_that_cannot_be(
    setting: str, content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "f.txt").write_text(content)
    with pytest.raises(UserError) as error:
        read_templates(setting, tmp_path)
    assert message in str(error.value)
    assert ("f.txt" if content is not None else "data.prompts") in str(error.value)
    assert "\n" not in str(error.value)
