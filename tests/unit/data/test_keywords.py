"""Keywords in sidecars and image files. tests/full/data/test_photo_library.py has other writers."""

import shutil
import struct

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

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


def packet(*properties, doctype=""):
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
        f'{doctype}<x:xmpmeta xmlns:x="adobe:ns:meta/">'
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


LIGHTROOM, DIGIKAM, FLAT = "lr:hierarchicalSubject", "digiKam:TagsList", "dc:subject"
NESTED = "<dc:relation><rdf:Description><dc:subject>x</dc:subject></rdf:Description></dc:relation>"
LISTS = {
    "copies and parents": (
        [
            (LIGHTROOM, ["Places", "Places|France", "Places|France|Paris"]),
            (DIGIKAM, ["Places/France/Paris"]),
            (FLAT, ["Paris", "France", "Places", "Places|France|Paris", " red\n  car ", ""]),
        ],
        (("Places", "France", "Paris"), ("red car",)),
    ),
    "separators in names": (
        [
            (FLAT, ["AC/DC", "a, b", "c; d", "e/f"]),
            (LIGHTROOM, ["Music|AC/DC"]),
            (DIGIKAM, ["Music/AC/DC"]),
        ],
        (("Music", "AC/DC"), ("a, b",), ("c; d",), ("e/f",)),
    ),
    "accents of macOS": (
        [(FLAT, ["cafe\u0301"]), (DIGIKAM, ["Food/caf\u00e9"])],
        (("Food", "caf\u00e9"),),
    ),
    "two and nested lists": (
        [(FLAT, ["a"]), (FLAT, ["b"]), "<dc:subject>c</dc:subject>", NESTED],
        (("a",), ("b",), ("c",)),
    ),
    "all keywords in one item": ([(FLAT, ["dog;beach; People/Anna;"])], (("dog",), ("beach",))),
    "case of people": (
        [(FLAT, ["anna", "DORA", "sea"]), ("Iptc4xmpExt:PersonInImage", ["Anna", "Dora"])],
        (("sea",),),
    ),
    "levels in a flat list": (
        [(FLAT, ["Places|Paris", "Paris", "a, b"])],
        (("Places", "Paris"), ("a, b",)),
    ),
}


@pytest.mark.parametrize(("lists", "content"), LISTS.values(), ids=LISTS)
def test_lists_have_one_content(photo, lists, content):
    assert read(photo, *lists).content == content


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


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
WHOLE = packet(("dc:subject", ["caf\u00e9"])).encode()
BROKEN = {
    "empty": b"",
    "truncated": WHOLE[:-40],
    "latin-1": WHOLE.decode().encode("latin-1"),
    "unknown encoding": b"<?xml version='1.0' encoding='klingon'?>" + WHOLE,
    "entities": packet(("dc:subject", ["&b;"]), doctype=BOMB).encode(),
    "external": packet(doctype="<!DOCTYPE x SYSTEM 'file:///etc/passwd'>").encode(),
    "not XML": b"\0\xff" * 99,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_sidecar_is_an_error_with_its_path(photo, kind):
    photo.with_name("a.xmp").write_bytes(BROKEN[kind])
    with pytest.raises(DataError, match=r"a\.xmp"):
        read_keywords(photo)


def test_broken_packet_in_a_photo_is_an_error_with_its_path(photo):
    Image.open(photo).save(photo, xmp=BROKEN["entities"])
    with pytest.raises(DataError, match=r"a\.jpg"):
        read_keywords(photo)


DARKTABLE = [
    "darktable|format|jpg",
    "darktable|changed",
    "darktable|exported",
    "darktable|style|Vintage",
]


def test_tags_of_darktable_are_not_content(photo):
    """Darktable 5 writes its own tags with their levels to dc:subject, too."""
    copies = ["darktable", "format", "jpg", "changed", "exported", "style", "Vintage"]
    keywords = read(
        photo,
        ("dc:subject", [*copies, "Oak", "Trees", "sea"]),
        ("lr:hierarchicalSubject", [*DARKTABLE, "Trees|Oak", "sea"]),
    )
    assert set(keywords.content) == {("Trees", "Oak"), ("sea",)}
    assert {"|".join(keyword) for keyword in keywords.internal} == set(DARKTABLE)
    assert set(keywords.listed) == set(keywords.content)

    # The user's own keywords with these names are under another parent, or in other photos.
    keywords = read(
        photo,
        ("dc:subject", ["Vintage", "exported"]),
        ("lr:hierarchicalSubject", ["darktable|style|Vintage", "Cars|Vintage"]),
    )
    assert keywords.content == (("Cars", "Vintage"), ("exported",))


@pytest.mark.parametrize(
    "tag",
    [
        "_Digikam_Internal_Tags_",
        "Color Label Red",
        "Pick Label Accepted",
        "Scanned for Faces",
        "Original Version",
        "iPhoto Original",
        "geotagged",
        "geo:lat=48.137",
        "lat=48.137",
        "*****",
        "\u2605\u2605\u2606",
        "Darktable/changed",
    ],
)
def test_tags_of_programs_in_flat_lists(photo, tag):
    keywords = read(photo, ("dc:subject", [tag, "red label", "version 2", "darktable"]))
    assert keywords.content == (("red label",), ("version 2",), ("darktable",))
    assert "/".join(keywords.internal[0]) == tag


@pytest.mark.parametrize(
    "root",
    [
        "People",
        "PEOPLE",
        "Personen",
        "personnes",
        "Personas",
        "Gente",
        "M\u00e4nniskor",
        "\u4eba\u7269",
    ],
)
@pytest.mark.parametrize("separator", ["|", "/", " > ", "\\", ": "])
@pytest.mark.parametrize("name", ["dc:subject", "lr:hierarchicalSubject", "digiKam:TagsList"])
def test_people_in_every_list_separator_and_case(photo, root, separator, name):
    text = f"{root}{separator}Anna Smith".replace(">", "&gt;")
    keywords = read(photo, (name, [text, "sea"]))
    assert keywords.content == (("sea",),)
    assert keywords.people == ((root, "Anna Smith"),)


@pytest.mark.parametrize("root", ["Familie", "FRIENDS", "Amis", "Famille", "Freunde"])
def test_groups_of_people(photo, root):
    lists = [
        ("lr:hierarchicalSubject", [f"{root}|Anna"]),
        ("digiKam:TagsList", [f"{root}/Eva/Lea"]),
    ]
    keywords = read(photo, *lists, ("dc:subject", ["Anna", "Family: Felidae", "Family"]))
    assert keywords.content == (("Family: Felidae",), ("Family",))
    assert keywords.people == ((root, "Anna"), (root, "Eva", "Lea"))


@pytest.mark.parametrize(
    "name", ["Gärten", "voilà", "Ágnes Œuvre", "d\u00e9j\u00e0 \u2013 vu\u2019s", "猫", "Straße €"]
)
@pytest.mark.parametrize("times", [1, 2])
def test_utf8_that_was_encoded_twice_is_repaired(photo, name, times):
    broken = name
    for _ in range(times):
        # The five bytes that Windows-1252 does not define are read as in Latin-1.
        letters = []
        for byte in broken.encode():
            try:
                letters.append(bytes([byte]).decode("cp1252"))
            except UnicodeDecodeError:
                letters.append(chr(byte))
        broken = "".join(letters)
    keywords = read(photo, ("dc:subject", [broken, name, "Ã", "café", "Ünï©ode"]))
    assert keywords.content == ((name,), ("Ã",), ("café",), ("Ünï©ode",))
    assert keywords.repaired == (name,)


def add_iptc(photo, *keywords):
    """Insert records 2:25 into a JPEG file."""
    records = b"".join(struct.pack(">BBBH", 28, 2, 25, len(text)) + text for text in keywords)
    block = b"8BIM" + struct.pack(">HHI", 0x0404, 0, len(records)) + records
    segment = b"Photoshop 3.0\0" + block + b"\0" * (len(block) % 2)
    content = photo.read_bytes()
    header = b"\xff\xed" + struct.pack(">H", len(segment) + 2)
    photo.write_bytes(content[:2] + header + segment + content[2:])


@pytest.mark.parametrize("records", [[b""], [b"cat", b""], [b"", b"cat"], [b"", b""]])
def test_empty_iptc_keyword_is_ignored(photo, records):
    add_iptc(photo, *records)
    expected = (("cat",),) if b"cat" in records else ()
    assert read_keywords(photo).content == expected


def test_damaged_iptc_does_not_hide_xmp(photo):
    Image.open(photo).save(photo, xmp=packet(("dc:subject", ["sea"])).encode())
    add_iptc(photo, b"cat")
    content = photo.read_bytes()
    assert read_keywords(photo).content == (("sea",), ("cat",))
    photo.write_bytes(content.replace(b"\x1c\x02\x19", b"\x99\x02\x19"))
    assert read_keywords(photo).content == (("sea",),)


def test_all_keywords_in_one_iptc_record(photo):
    add_iptc(photo, b"dog;beach")
    assert read_keywords(photo).content == (("dog",), ("beach",))


@pytest.mark.parametrize("ending", ["", "\0", "\0\0"])
def test_keywords_of_windows_in_exif(photo, ending):
    exif = Image.Exif()
    exif[0x9C9E] = ("dog;beach; Straße;People/Anna;" + ending).encode("utf-16-le")
    Image.open(photo).save(photo, exif=exif)
    keywords = read_keywords(photo)
    assert keywords.content == (("dog",), ("beach",), ("Straße",))
    assert keywords.people == (("People", "Anna"),)


@pytest.mark.parametrize("compressed", [True, False])
def test_png_with_large_text_chunks_keeps_its_keywords(tmp_path, compressed):
    info = PngInfo()
    info.add_text("parameters", "x" * 3_000_000, zip=True)
    edits = f"<dc:description>{'y' * 2_000_000}</dc:description>"
    xmp = packet(("dc:subject", ["sea"]), edits)
    info.add_itxt("XML:com.adobe.xmp", xmp, zip=compressed)
    photo = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(photo, pnginfo=info)
    assert read_keywords(photo).content == (("sea",),)


def test_packet_of_a_gif_file(tmp_path):
    photo = tmp_path / "a.gif"
    Image.new("P", (8, 8)).save(photo)
    content = photo.read_bytes()
    extension = b"!\xff\x0bXMP DataXMP" + packet(("dc:subject", ["sea"])).encode()
    trailer = bytes([1, *range(255, -1, -1), 0])
    photo.write_bytes(content[:-1] + extension + trailer + content[-1:])
    assert read_keywords(photo).content == (("sea",),)
