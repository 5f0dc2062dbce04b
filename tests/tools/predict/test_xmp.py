"""Sidecars of photos, read by Exiv2, which photo managers use."""

import os
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from mldec.data.keywords import read_keywords
from mldec.errors import ConfigError, DataError
from mldec.files import xmp
from mldec.tools.predict import xmp as sidecars
from mldec.tools.predict.answers import Prediction, Row
from mldec.tools.predict.xmp import undo

SUBJECT, TAGS, OWN = "Xmp.dc.subject", "Xmp.digiKam.TagsList", "Xmp.mldec.keywords"
PATHS_KEY = "Xmp.lr.hierarchicalSubject"

# As digiKam writes it, with other properties and a comment.
OF_USER = """<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="XMP Core 4.4.0-Exiv2">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><!-- mine -->
  <rdf:Description rdf:about="" xmlns:digiKam="http://www.digikam.org/ns/1.0/"
    xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:xmp="http://ns.adobe.com/xap/1.0/"
    xmp:Rating="4">
   <digiKam:TagsList><rdf:Seq><rdf:li>Places/Paris</rdf:li><rdf:li>dog</rdf:li></rdf:Seq></digiKam:TagsList>
   <dc:subject><rdf:Bag><rdf:li>Paris</rdf:li><rdf:li>dog</rdf:li></rdf:Bag></dc:subject>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>"""


LATIN = f"<?xml version='1.0' encoding='latin-1'?>{OF_USER}".replace("\ufeff", "").replace(
    "mine", "f\xfcr"
)


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (8, 8), "red").save(path)
    return path


def row(photo, *names):
    predictions = [Prediction(i, name, 0.9) for i, name in enumerate(names)]
    return Row(photo.name, predictions, path=str(photo))


def write_sidecar(row, parent=None):
    """Write the sidecar of a photo, and return its path. None if it does not exist."""
    sidecars.write_sidecar(row, parent)
    if row.path is None:
        return None
    path = sidecars.sidecar_of(Path(row.path))
    return path if path.exists() else None


def read(path):
    """Return the properties of a sidecar, as Exiv2 reads them."""
    pyexiv2 = pytest.importorskip("pyexiv2")
    pyexiv2.registerNs(xmp.OWN[1], "mldec")
    pyexiv2.registerNs(xmp.DIGIKAM[1], "digiKam")
    # Exiv2 opens a file of XMP alone as an image without pixels.
    with pyexiv2.Image(str(path)) as image:
        return image.read_xmp()


def test_new_sidecar_contains_the_classes(photo):
    content = photo.read_bytes()
    path = write_sidecar(row(photo, "dog", "living room", "客厅 & <sofa>", "dog"))
    assert path == photo.with_name("photo.jpg.xmp")
    names = ["dog", "living room", "客厅 & <sofa>"]
    properties = read(path)
    assert properties[SUBJECT] == properties[TAGS] == properties[OWN] == names
    assert photo.read_bytes() == content
    assert sorted(photo.parent.iterdir()) == [photo, path]


def test_keywords_of_the_user_are_kept_and_ours_are_replaced(photo):
    path = photo.with_name("photo.jpg.xmp")
    path.write_text(OF_USER, encoding="utf-8")
    write_sidecar(row(photo, "dog", "tree"))
    properties = read(path)
    assert properties[SUBJECT] == ["Paris", "dog", "tree"]
    assert properties[TAGS] == ["Places/Paris", "dog", "tree"]
    assert properties[OWN] == ["tree"]
    assert properties["Xmp.xmp.Rating"] == "4"
    assert "<!-- mine -->" in path.read_text(encoding="utf-8")

    # The user has "dog" and adds "cat"; "tree" is ours.
    path.write_text(path.read_text().replace("<rdf:li>Paris", "<rdf:li>cat</rdf:li><rdf:li>Paris"))
    write_sidecar(row(photo, "sky"))
    properties = read(path)
    assert properties[SUBJECT] == ["cat", "Paris", "dog", "sky"]
    assert properties[TAGS] == ["Places/Paris", "dog", "sky"]
    assert properties[OWN] == ["sky"]

    write_sidecar(row(photo))
    properties = read(path)
    assert properties[SUBJECT] == ["cat", "Paris", "dog"]
    assert not properties.get(OWN)


def test_equal_keywords_do_not_change_the_file(photo):
    path = write_sidecar(row(photo, "dog"))
    written = path.stat().st_mtime_ns, path.stat().st_ino
    assert write_sidecar(row(photo, "dog")) == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    assert ElementTree.parse(path).getroot().tag == "{adobe:ns:meta/}xmpmeta"


def test_numbers_of_sidecars(photo):
    photo.with_name("photo.xmp").write_text(OF_USER, encoding="utf-8")
    photo.with_name("photo.png").touch()  # photo.xmp belongs to two images, so it is not used
    for names, expected in (
        (["tree"], {"written": 1, "unchanged": 1}),
        (["tree"], {"unchanged": 2}),
        (["sky"], {"written": 1, "unchanged": 1}),
        ([], {"removed": 1, "unchanged": 1}),
        ([], {"unchanged": 1}),
    ):
        counts = Counter(sidecars.write_sidecar(row(photo, *names), "New"))
        del counts["missing"]
        assert counts == expected


def test_no_sidecar_without_classes(photo):
    assert write_sidecar(row(photo)) is None
    assert write_sidecar(Row(str(photo), error="it cannot be read")) is None
    assert list(photo.parent.iterdir()) == [photo]


@pytest.mark.parametrize(
    "content",
    [
        b"\x00",
        b"<x:xmpmeta xmlns:x='adobe:ns:meta/'/>",
        LATIN.encode("latin-1"),
        LATIN.replace("\xfc", "u").encode(),
        OF_USER.encode("utf-16"),
        OF_USER.replace(
            "<rdf:Bag><rdf:li>Paris</rdf:li><rdf:li>dog</rdf:li></rdf:Bag>", "x"
        ).encode(),
    ],
)
def test_unusable_sidecar_raises_an_error_and_is_kept(photo, content):
    path = photo.with_name("photo.jpg.xmp")
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        write_sidecar(row(photo, "tree"))
    assert path.read_bytes() == content
    with pytest.raises(ConfigError, match=r"a\.jpg"):
        write_sidecar(row(Path(photo.parent, "photos.tar", "a.jpg"), "dog"))


HIERARCHY = """<?xpacket begin="" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{RDF}">
 <rdf:Description rdf:about="" xmlns:d="http://www.digikam.org/ns/1.0/"
   xmlns:lr="http://ns.adobe.com/lightroom/1.0/">
  {properties}
 </rdf:Description></rdf:RDF></x:xmpmeta><?xpacket end="w"?>"""
TAGS_LIST = "<d:TagsList><rdf:Seq><rdf:li>{}</rdf:li></rdf:Seq></d:TagsList>"
PATHS = "<lr:hierarchicalSubject><rdf:Bag><rdf:li>{}</rdf:li></rdf:Bag></lr:hierarchicalSubject>"


@pytest.mark.parametrize(
    "properties",
    [
        TAGS_LIST.format("six"),
        TAGS_LIST.format("Digits/six") + PATHS.format("Digits|six"),
    ],
)
def test_keyword_in_any_list_of_the_user_is_kept(photo, properties):
    path = photo.with_name("photo.jpg.xmp")
    content = HIERARCHY.format(RDF=xmp.RDF, properties=properties)
    path.write_text(content)
    write_sidecar(row(photo, "six"))
    assert path.read_text() == content

    write_sidecar(row(photo, "six", "two"))
    # A new list starts with the keywords in other lists: applications read one of them.
    read_back = read(path)
    assert read_back[SUBJECT] == ["six", "two"]
    assert read_back[OWN] == ["two"]
    write_sidecar(row(photo, "two"))
    write_sidecar(row(photo))
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("encoding", "declaration"),
    [
        ("utf-8", ""),
        ("utf-8-sig", ""),
        ("utf-8", '<?xml version="1.0"?>'),
        ("utf-8", '<?xml version="1.0" encoding="UTF-8"?>'),
    ],
)
def test_all_other_bytes_are_kept(photo, encoding, declaration):
    path = photo.with_name("photo.jpg.xmp")
    text = declaration + OF_USER.replace("\ufeff", "").replace("\n", "\r\n")
    text = text.replace('xmp:Rating="4"', 'xmp:Rating="4" dc:source="a&#10;b &#x9; > c"')
    text = text.replace("<!-- mine -->", "<!-- mine --><?x y?>")
    content = text.encode(encoding)
    path.write_bytes(content)
    write_sidecar(row(photo, "tree & \u5ba2", "dog"))
    added = path.read_bytes()
    assert added != content
    for line in content.splitlines(keepends=True)[:4]:
        assert line in added
    subjects = ElementTree.parse(path).getroot().findall(f".//{{{xmp.SUBJECT[1]}}}subject//")
    assert [item.text for item in subjects if item.text][-1] == "tree & \u5ba2"

    write_sidecar(row(photo))
    assert path.read_bytes() == content


@pytest.mark.parametrize("tag", ["<rdf:Bag/>", "<rdf:Bag>\n  </rdf:Bag>"])
def test_keywords_are_added_to_an_empty_list_and_removed_from_it(photo, tag):
    path = photo.with_name("photo.jpg.xmp")
    subject = f'<s:subject xmlns:s="{xmp.SUBJECT[1]}">{tag}</s:subject>'
    content = HIERARCHY.format(RDF=xmp.RDF, properties=subject)
    path.write_text(content)
    write_sidecar(row(photo, "one", "two"))
    assert read(path)[SUBJECT] == ["one", "two"]
    write_sidecar(row(photo, "three"))
    assert undo([str(photo)]) == 0
    assert path.read_text() == content.replace("<rdf:Bag/>", "<rdf:Bag></rdf:Bag>")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_link_mode_and_owner_are_kept(photo, tmp_path):
    target = tmp_path / "kept" / "real.xmp"
    target.parent.mkdir()
    target.write_text(OF_USER)
    target.chmod(0o640)
    if os.getuid() == 0:
        os.chown(target, 1234, 5678)
    before = target.stat()
    path = photo.with_name("photo.jpg.xmp")
    path.symlink_to(target)
    write_sidecar(row(photo, "tree"))
    assert path.is_symlink()
    assert "tree" in target.read_text()
    after = target.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert [item.name for item in target.parent.iterdir()] == ["real.xmp"]


def test_parent_and_paths_have_the_form_of_each_list(photo):
    path = write_sidecar(row(photo, "dog", "Places/Paris", "a|b"), "New/AI")
    lists = read(path)
    assert lists[SUBJECT] == ["dog", "Paris", "a|b"]
    assert lists[TAGS] == lists[OWN] == ["New/AI/dog", "New/AI/Places/Paris", "New/AI/a|b"]
    assert lists[PATHS_KEY] == ["New|AI|dog", "New|AI|Places|Paris", "New|AI|a/b"]


def test_embedded_keywords_are_not_added_and_copied_to_new_lists(photo):
    packet = OF_USER.replace("digiKam:TagsList", "digiKam:Other")
    Image.open(photo).save(photo, xmp=packet.encode())
    assert write_sidecar(row(photo, "paris", "Dog")) is None
    path = write_sidecar(row(photo, "paris", "tree"), "Suggested")
    lists = read(path)
    assert lists[SUBJECT] == ["Paris", "dog", "tree"]
    assert lists[TAGS] == ["Paris", "dog", "Suggested/tree"]
    assert lists[OWN] == ["Suggested/tree"]
    assert read_keywords(photo).content == (("Paris",), ("dog",))


def test_keyword_that_the_user_moved_is_kept(photo):
    path = write_sidecar(row(photo, "dog", "tree"), "Suggested")
    text = path.read_text()
    path.write_text(
        text.replace("<rdf:Seq><rdf:li>Suggested/dog<", "<rdf:Seq><rdf:li>Animals/dog<")
    )
    assert undo([str(photo)]) == 0
    lists = read(path)
    assert (lists[SUBJECT], lists[TAGS]) == (["dog"], ["Animals/dog"])


def test_sidecar_without_the_suffix_is_written_if_it_is_the_only_one(photo):
    shared = photo.with_name("photo.xmp")
    shared.write_text(OF_USER)
    assert write_sidecar(row(photo, "tree")) == shared
    assert not photo.with_name("photo.jpg.xmp").exists()

    # Another photo has the same name, so that each needs its own sidecar.
    Image.new("RGB", (8, 8)).save(photo.with_suffix(".PNG"))
    path = photo.with_name("photo.jpg.xmp")
    assert write_sidecar(row(photo, "tree")) == path
    assert shared.read_text() == OF_USER
    assert undo([str(photo.parent)]) == 0
    assert {item.name for item in photo.parent.iterdir()} == {"photo.jpg", "photo.PNG", "photo.xmp"}


def test_undo_restores_all_sidecars_except_broken_ones(photo, capsys):
    folder = photo.parent / "below"
    folder.mkdir()
    orphan = folder / "gone.jpg.xmp"
    orphan.write_text(OF_USER)
    (folder / "gone.jpg").write_bytes(photo.read_bytes())
    write_sidecar(row(folder / "gone.jpg", "tree"))
    (folder / "gone.jpg").unlink()
    created = write_sidecar(row(photo, "tree"))
    broken = folder / "broken.xmp"
    broken.write_bytes(created.read_bytes()[:-50])
    foreign = folder / "foreign.xmp"
    foreign.write_text("broken")
    leftover = folder / ".gone.jpg.xmp.0123abcd.mldec.tmp"
    leftover.touch()

    assert undo([str(photo.parent)]) == 1
    assert "broken.xmp" in capsys.readouterr().err
    assert orphan.read_text() == OF_USER
    assert sorted(folder.iterdir()) == [broken, foreign, orphan]
    assert not created.exists()
    with pytest.raises(ConfigError, match="absent"):
        undo([str(folder / "absent")])


ENTITY = "<!DOCTYPE x [<!ENTITY a '<rdf:li>b</rdf:li>'>]>" + HIERARCHY.format(
    RDF=xmp.RDF, properties=TAGS_LIST.format("&a;")
)


@pytest.mark.parametrize("kind", ["entity", "twice"])
def test_unusual_sidecars_are_changed_correctly_or_not_at_all(photo, kind):
    path = photo.with_name("photo.jpg.xmp")
    subject = "<dc:subject><rdf:Bag><rdf:li>b</rdf:li></rdf:Bag></dc:subject>"
    content = OF_USER.replace("  </rdf:Description>", f"{subject}  </rdf:Description>")
    path.write_text(ENTITY if kind == "entity" else content)
    if kind == "entity":
        with pytest.raises(DataError, match=str(path)):
            write_sidecar(row(photo, "tree"))
        assert path.read_text() == ENTITY
    else:
        write_sidecar(row(photo, "tree", "b"))
        assert path.read_text().count(">tree<") == 4
        assert undo([str(path)]) == 0
        assert path.read_text() == content


def test_accepted_suggestion_keeps_copies_of_keywords():
    suggested = [("Suggested", "tree"), ("Suggested", "dog")]
    content = xmp.with_keywords(xmp.EMPTY, suggested, of_photo=[("grass",), ("sky",)])
    accepted = content
    for kind, parent in (
        (b"digiKam:TagsList", b"Suggested/"),
        (b"lr:hierarchicalSubject", b"Suggested|"),
    ):
        start = accepted.index(b"<" + kind)
        end = accepted.index(b"</" + kind)
        edited = accepted[start:end].replace(parent + b"tree", b"tree")
        accepted = accepted[:start] + edited + accepted[end:]

    restored, _ = xmp.without_own(accepted)
    for kind in (b"digiKam:TagsList", b"lr:hierarchicalSubject", b"dc:subject"):
        listed = restored[restored.index(b"<" + kind) : restored.index(b"</" + kind)]
        assert re.findall(rb"li>(\w+)</", listed) == [b"grass", b"sky", b"tree"]
    # Without an accepted suggestion, nothing is left.
    assert xmp.without_own(content)[0] == xmp.EMPTY
