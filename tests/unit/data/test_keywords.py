"""Keywords in sidecars and image files. tests/full/data/test_photo_library.py has other writers."""

import shutil

import pytest
from PIL import Image

from mldec.data.keywords import read_keywords
from mldec.errors import DataError
from mldec.files.xmp import with_keywords

NAMESPACES = {
    "dc": "http://purl.org/dc/elements/1.1/",
    "lr": "http://ns.adobe.com/lightroom/1.0/",
    "digiKam": "http://www.digikam.org/ns/1.0/",
    "MicrosoftPhoto": "http://ns.microsoft.com/photo/1.0/",
    "mldec": "urn:mldec:xmp:1.0/",
    "Iptc4xmpExt": "http://iptc.org/std/Iptc4xmpExt/2008-02-29/",
    "mwg-rs": "http://www.metadataworkinggroup.com/schemas/regions/",
    "MPReg": "http://ns.microsoft.com/photo/1.2/t/Region#",
}


def packet(*properties):
    """Return an XMP packet. A property is XML, or a name and the items of its list."""
    body = ""
    for item in properties:
        if not isinstance(item, str):
            name, texts = item
            lines = "".join(f"<rdf:li>{text}</rdf:li>" for text in texts)
            item = f"<{name}><rdf:Bag>{lines}</rdf:Bag></{name}>"
        body += item
    declared = "".join(f' xmlns:{prefix}="{uri}"' for prefix, uri in NAMESPACES.items())
    return (
        f'<x:xmpmeta xmlns:x="adobe:ns:meta/">'
        '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<rdf:Description rdf:about=""{declared}>{body}</rdf:Description></rdf:RDF></x:xmpmeta>'
    )


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path)
    return path


def read(photo, *properties):
    photo.with_name("a.jpg.xmp").write_text(packet(*properties), encoding="utf-8")
    return read_keywords(photo)


def test_photo_without_keywords(photo, tmp_path):
    for path in (photo, tmp_path / "absent.jpg"):
        keywords = read_keywords(path)
        assert (keywords.content, keywords.people, keywords.own) == ((), (), ())


@pytest.mark.parametrize("name", ["a.xmp", "a.jpg.xmp", "a.XMP"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_sidecar_names_and_encodings(photo, name, encoding):
    content = packet(("dc:subject", ["chat noir", "caf\u00e9", "<![CDATA[a & b]]>"]))
    photo.with_name(name).write_text(content, encoding=encoding)
    assert read_keywords(photo).content == (("chat noir",), ("caf\u00e9",), ("a & b",))


def test_all_lists_of_both_sidecars_and_of_the_file_are_merged(photo):
    image = Image.open(photo)
    embedded = packet(("dc:subject", ["embedded"]), ("MicrosoftPhoto:LastKeywordXMP", ["a/b"]))
    image.save(photo, xmp=embedded.encode())
    photo.with_name("a.xmp").write_text(packet(("lr:hierarchicalSubject", ["Places|Paris"])))
    keywords = read(photo, ("digiKam:TagsList", ["Trees/Oak"]), ("dc:subject", ["sea"]))
    expected = {("Places", "Paris"), ("Trees", "Oak"), ("a", "b"), ("embedded",), ("sea",)}
    assert set(keywords.content) == expected
    assert {"Places", "Places/Paris", "Oak", "sea"} <= keywords.names()


def test_flat_copies_and_parents_are_the_same_keyword(photo):
    keywords = read(
        photo,
        ("lr:hierarchicalSubject", ["Places", "Places|France", "Places|France|Paris"]),
        ("digiKam:TagsList", ["Places/France/Paris"]),
        ("dc:subject", ["Paris", "France", "Places", "Places|France|Paris", " red\n  car ", ""]),
    )
    assert keywords.content == (("Places", "France", "Paris"), ("red car",))


def test_separators_in_names_are_kept(photo):
    keywords = read(
        photo,
        ("dc:subject", ["AC/DC", "a, b", "c; d", "e/f"]),
        ("lr:hierarchicalSubject", ["Music|AC/DC"]),
        ("digiKam:TagsList", ["Music/AC/DC"]),
    )
    assert keywords.content == (("Music", "AC/DC"), ("a, b",), ("c; d",), ("e/f",))


def test_accents_of_macos_are_normalized(photo):
    keywords = read(photo, ("dc:subject", ["cafe\u0301"]), ("digiKam:TagsList", ["Food/caf\u00e9"]))
    assert keywords.content == (("Food", "caf\u00e9"),)


def test_people_and_albums_are_separate(photo):
    region = (
        "<mwg-rs:Regions rdf:parseType='Resource'><mwg-rs:RegionList><rdf:Bag>"
        "<rdf:li><rdf:Description mwg-rs:Name='Bob' mwg-rs:Type='Face'/></rdf:li>"
        "<rdf:li rdf:parseType='Resource'><mwg-rs:Name>Rex</mwg-rs:Name>"
        "<mwg-rs:Type>Pet</mwg-rs:Type></rdf:li>"
        "<rdf:li><rdf:Description mwg-rs:Name='sea' mwg-rs:Type='Focus'/></rdf:li>"
        "</rdf:Bag></mwg-rs:RegionList></mwg-rs:Regions>"
        "<dc:relation><rdf:Description MPReg:PersonDisplayName='Carl'/></dc:relation>"
    )
    keywords = read(
        photo,
        ("digiKam:TagsList", ["People/Anna", "Albums/2020", "Family/Bob"]),
        ("dc:subject", ["Anna", "Bob", "Carl", "Dora", "Rex", "People", "sea", "People watching"]),
        ("Iptc4xmpExt:PersonInImage", ["Dora"]),
        region,
    )
    assert keywords.content == (("sea",), ("People watching",))
    people = {keyword[-1] for keyword in keywords.people}
    assert people == {"Anna", "2020", "Bob", "Carl", "Dora", "Rex"}


def test_own_keywords_and_their_copies_are_no_labels(photo):
    # `predict --xmp` writes "dog".
    sidecar = photo.with_name("a.jpg.xmp")
    sidecar.write_text(packet(("dc:subject", ["cat"]), ("lr:hierarchicalSubject", ["Pets|cat"])))
    sidecar.write_bytes(with_keywords(sidecar.read_bytes(), [("dog",)]))
    keywords = read_keywords(photo)
    assert keywords.content == (("Pets", "cat"),)
    assert keywords.own == ("dog",)

    # Another program copies them to the other sidecar. A path of the user has the same name.
    shutil.copy(sidecar, photo.with_name("a.xmp"))
    assert read_keywords(photo) == keywords
    keywords = read(
        photo,
        ("dc:subject", ["dog", "sea"]),
        ("digiKam:TagsList", ["Auto/dog", "Pets/dog", "Auto/sky"]),
        ("lr:hierarchicalSubject", ["Auto|sky"]),
        ("mldec:keywords", ["Auto/dog", "Auto|sky"]),
    )
    assert set(keywords.content) == {("Pets", "dog"), ("sea",), ("Pets", "cat")}


def test_two_lists_and_nested_lists(photo):
    nested = "<dc:relation><rdf:Description><dc:subject>other</dc:subject></rdf:Description>"
    keywords = read(
        photo,
        ("dc:subject", ["a"]),
        ("dc:subject", ["b"]),
        "<dc:subject>c</dc:subject>",
        f"{nested}</dc:relation>",
    )
    assert keywords.content == (("a",), ("b",), ("c",))


WHOLE = packet(("dc:subject", ["caf\u00e9"])).encode()
BROKEN = {
    "empty": b"",
    "truncated": WHOLE[:-40],
    "latin-1": WHOLE.decode().encode("latin-1"),
    "unknown encoding": b"<?xml version='1.0' encoding='klingon'?>" + WHOLE,
    "not XML": b"\0\xff" * 99,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_sidecar_is_an_error_with_its_path(photo, kind):
    photo.with_name("a.xmp").write_bytes(BROKEN[kind])
    with pytest.raises(DataError, match=r"a\.xmp"):
        read_keywords(photo)


def test_broken_packet_in_a_photo_is_an_error_with_its_path(photo):
    Image.open(photo).save(photo, xmp=BROKEN["truncated"])
    with pytest.raises(DataError, match=r"a\.jpg"):
        read_keywords(photo)
