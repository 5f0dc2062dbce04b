"""Forms and workflows of GitHub: valid YAML, unique ids, and actions pinned by commit."""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / ".github"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a source distribution has no .github")
PINNED = re.compile(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
# Types of fields in the syntax of issue forms. Fields with an answer need an id and a label.
ANSWERS = {"input", "textarea", "dropdown", "checkboxes", "upload"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("workflows/*.yml")), ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path):
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    actions = re.findall(r"\buses: *(.+)", text)
    assert actions
    assert [action for action in actions if not PINNED.fullmatch(action)] == []


@pytest.mark.parametrize("name", ["bug", "question"])
def test_issue_forms_are_valid(name):
    form = yaml.safe_load((FOLDER / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= ANSWERS
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_dependabot_updates_packages_and_actions():
    content = yaml.safe_load((FOLDER / "dependabot.yml").read_text())
    ecosystems = {update["package-ecosystem"] for update in content["updates"]}
    assert content["version"] == 2
    assert ecosystems == {"pip", "github-actions"}
