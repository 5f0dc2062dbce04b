"""Keywords of photos, as written by photo managers, from sidecars and image files.

Sources: XMP specification parts 1 to 3 (ISO 16684-1), MWG guidelines 2.0 (`mwg-rs`), Microsoft's
people tags (`MPReg`), IPTC IIM 4.2, and the namespaces that exiftool and Exiv2 document.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unicodedata import normalize
from xml.etree.ElementTree import Element, TreeBuilder, XMLParser

from PIL import Image
from PIL.ExifTags import IFD, Base
from PIL.ImageFile import ImageFile
from PIL.IptcImagePlugin import getiptcinfo

from mldec.data.images import FORMATS
from mldec.errors import DataError, naming_errors
from mldec.files.text import read_if_exists
from mldec.files.xmp import Keyword, without_own

_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
_SUBJECT = "{http://purl.org/dc/elements/1.1/}subject"

# Lists of keywords, and the separators of their levels. Lightroom's list is first, because its
# names may contain a slash. Exiv2 and exiftool write different namespaces for Microsoft's list.
# dc:subject and the lists of IPTC and EXIF are flat, but some programs write paths to them, too.
_LISTS = {
    "{http://ns.adobe.com/lightroom/1.0/}hierarchicalSubject": "|",
    "{http://www.digikam.org/ns/1.0/}TagsList": "/",
    "{http://ns.microsoft.com/photo/1.0/}LastKeywordXMP": "/",
    "{http://ns.microsoft.com/photo/1.0}LastKeywordXMP": "/",
    _SUBJECT: "|",
}

# Names of people. The first are lists, the others are fields of a region in the photo.
_PERSONS = "{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}PersonInImage"
_MEDIAPRO_PEOPLE = "{http://ns.iview-multimedia.com/mediapro/1.0/}People"
_DISPLAY_NAME = "{http://ns.microsoft.com/photo/1.2/t/Region#}PersonDisplayName"
_REGION = "{http://www.metadataworkinggroup.com/schemas/regions/}"

# Top-level keywords of people and albums, compared ignoring case. digiKam puts the names of faces
# under the translation of "People"; the others are conventions of users.
_PEOPLE = """
    people person persons faces personen leute menschen gesichter personnes gens visages
    personas gente rostros persone pessoas mensen människor mennesker ihmiset люди ludzie 人物
"""
# Keywords below these are ignored as well, but a name in them may mean something else elsewhere:
# albums, and groups of people which may also contain events or pets, such as Family/Wedding.
_GROUPS = """
    albums alben álbumes family familie famille familia família famiglia rodzina семья 家族
    friends freunde amis amigos amici vrienden venner vänner przyjaciele друзья 友達
"""
GROUPS = frozenset(_GROUPS.split())
_NOT_CONTENT = GROUPS | set(_PEOPLE.split())

# Tags that programs write for themselves: top-level keywords of darktable (5.0 and later) and
# digiKam, and single keywords. The latter are the internal tags of digiKam, a keyword of iPhoto,
# and machine tags such as geo:lat=48.1, which geotagging programs write together with "geotagged".
_PROGRAMS = frozenset(("darktable", "_digikam_root_tag_", "_digikam_internal_tags_"))
_PROGRAM_TAG = re.compile(
    r"""
    _digikam_\w+ | (color|pick)[ ]label[ ]\w+ | scanned[ ]for[ ]faces | need[ ]to[ ]train[ ]faces
    | need[ ]resolving[ ]history | need[ ]tagging[ ]history[ ]graph | version[ ]always[ ]visible
    | (original|intermediate|current)[ ]version | iphoto[ ]original | geotagged | \w+:\w+=.*
    | (lat|lon|alt)=[-+.\d]+ | [*★☆]+
    """,
    re.IGNORECASE | re.VERBOSE,
)

# Separators of the levels of a keyword in any list.
_SEPARATORS = re.compile(r"[|/\\>:]")

_UTF8 = b"\x1b%G"  # IPTC 1:90, the coded character set


@dataclass(frozen=True)
class PhotoKeywords:
    """The keywords of a photo. Parents of a listed keyword are not listed again.

    Attributes:
        content: Keywords of the user, without people and albums.
        people: Keywords of the user that are people or albums, and names of marked people.
        internal: Tags that programs write for themselves. They are in no other list.
        own: Keywords that mldec has added (`mldec:keywords`), as written. They are in no other
            list, unless the user has the same name under another parent.
        listed: All keywords of the user that are in a list, unlike the names of faces.
        repaired: Keywords whose UTF-8 encoding was encoded again, after the repair.
        taken: Camera model and capture time in seconds, from the EXIF data of the file.
    """

    content: tuple[Keyword, ...]
    people: tuple[Keyword, ...]
    internal: tuple[Keyword, ...]
    own: tuple[str, ...]
    listed: tuple[Keyword, ...]
    repaired: tuple[str, ...]
    taken: tuple[str, float] | None

    def names(self) -> set[str]:
        """Return the names and the paths ("Places/Paris") that the user has given to the photo.

        They include parents, and people and albums.
        """
        names: set[str] = set()
        for keyword in self.content + self.people:
            names.update(keyword)
            names.update(paths_of(keyword))
        return names


def paths_of(keyword: Keyword) -> list[str]:
    """Return a keyword and its parents as paths: "Places", "Places/Paris"."""
    return ["/".join(keyword[: level + 1]) for level in range(len(keyword))]


def read_keywords(photo: Path) -> PhotoKeywords:
    """Return the keywords of a photo: from its sidecars, and those embedded in the file.

    Sidecars are photo.xmp and photo.jpg.xmp. The lists dc:subject, lr:hierarchicalSubject,
    digiKam:TagsList, MicrosoftPhoto:LastKeywordXMP, IPTC 2:25 and XPKeywords (EXIF, written by
    Windows) are merged. A flat keyword that is a name or a parent in a list of paths is not listed
    again. Lightroom does not permit "|" in names, so it separates levels in all lists.

    A keyword is a person or an album if its top-level parent is "People" (digiKam's faces, and a
    convention of Lightroom's users), "Family", "Friends", "Albums" or a translation, or if its name
    is the name of a face or pet region (MWG regions of digiKam, Lightroom and Picasa), of a
    Microsoft people tag, or in Iptc4xmpExt:PersonInImage or mediapro:People. Names are compared
    ignoring case.

    Embedded metadata is read from the formats of `read_image`. Files of other formats have only
    sidecars. Parts beyond the first 64 KiB of an embedded packet (extended XMP) are not read.

    Raises:
        DataError: If metadata cannot be read. The message has the path of the file.
    """
    lists = _Lists()
    for sidecar in sidecars(photo):
        content = read_if_exists(sidecar)
        if content is not None:
            lists.add_xmp(sidecar, content)

    lists.add_embedded(photo)
    return lists.merge()


def keywords_in(path: Path, content: bytes) -> PhotoKeywords:
    """Return the keywords of a sidecar by its content; see `read_keywords`."""
    lists = _Lists()
    lists.add_xmp(path, content)
    return lists.merge()


def sidecars(photo: Path) -> list[Path]:
    """Return the possible paths of the sidecars of a photo."""
    stems = (photo.with_suffix(""), photo)
    return [stem.with_name(stem.name + suffix) for stem in stems for suffix in (".xmp", ".XMP")]


class _WithoutDoctype(TreeBuilder):
    """Reject document types, which could define entities. XMP has none."""

    def doctype(self, name: str, public: str, system: str) -> None:
        raise ValueError("it has a document type")


class _Lists:
    """The lists of keywords in the metadata of a photo."""

    def __init__(self) -> None:
        # The keys have the separator "/". A dictionary keeps the order, and has no duplicates.
        self.paths: dict[str, dict[str, Keyword]] = {name: {} for name in _LISTS}
        self.flat: dict[str, None] = {}
        self.own: dict[str, None] = {}
        self.repaired: dict[str, None] = {}
        self.persons: dict[str, None] = {}
        self.taken: tuple[str, float] | None = None

    def add_xmp(self, path: Path, content: bytes) -> None:
        """Add the lists of an XMP packet of the file `path`."""
        with naming_errors(path, DataError, remedy="write its metadata again, or remove it"):
            # New lists of mldec contain copies of keywords, which the user may have removed since.
            content, own = without_own(content)
            self.own |= dict.fromkeys(own)
            parser = XMLParser(target=_WithoutDoctype())
            parser.feed(content)
            root = parser.close()

        # Deeper levels may describe other images, such as the parts of a collage.
        for rdf in root.iter(f"{_RDF}RDF"):
            for element in rdf.iterfind(f"{_RDF}Description/*"):
                self._add_property(element)
        self.persons |= dict.fromkeys(_names_of_regions(root))

    def _add_property(self, element: Element) -> None:
        texts = [item.text or "" for item in element.iter(f"{_RDF}li")]
        if not len(element):
            texts = [element.text or ""]
        if element.tag == _SUBJECT:
            texts = _separate(texts)

        if element.tag in (_PERSONS, _MEDIAPRO_PEOPLE):
            self.persons |= dict.fromkeys(filter(None, map(_clean, texts)))
        elif element.tag in _LISTS:
            for text in texts:
                self._add(element.tag, text)

    def _add(self, tag: str, text: str) -> None:
        """Add a keyword of a list in `_LISTS`."""
        name = _clean(text)
        if _repair(text) != text:
            self.repaired[name] = None
        keyword = _levels(name, _LISTS[tag])
        if tag == _SUBJECT and len(keyword) == 1:
            self.flat[keyword[0]] = None
        elif keyword:
            self.paths[tag]["/".join(keyword)] = keyword

    def add_embedded(self, photo: Path) -> None:
        """Add the XMP packet, the IPTC and EXIF keywords and the capture time in an image file."""
        try:
            with Image.open(photo, formats=FORMATS) as image:
                # PNG files may have metadata after the pixels.
                if image.format == "PNG" and "xmp" not in image.info:
                    image.load()
                xmp = image.info.get("xmp")
                if image.format == "GIF":
                    # Pillow does not read the packet, which ends before its "magic trailer".
                    _, _, rest = photo.read_bytes().partition(b"\xff\x0bXMP DataXMP")
                    xmp = rest.partition(b"\x01\xff\xfe")[0]
                flat = _embedded_keywords(image)
                self.taken = _capture(image)
        except MemoryError:
            raise
        except Exception:
            # It is missing, damaged or has another format. `read_image` gives the reason.
            return

        if isinstance(xmp, str):
            xmp = xmp.encode()
        if xmp:
            self.add_xmp(photo, xmp.rstrip(b"\0 \r\n"))
        for text in flat:
            self._add(_SUBJECT, text)

    def merge(self) -> PhotoKeywords:
        """Return the keywords without duplicates, divided into the lists of `PhotoKeywords`."""
        paths: dict[str, Keyword] = {}
        for listed in self.paths.values():
            for name, keyword in listed.items():
                paths.setdefault(name, keyword)
        own_paths = {name.replace("|", "/") for name in self.own}
        # Flat lists have only the last part of a path.
        own_names = own_paths | {name.rpartition("/")[2] for name in own_paths}
        for name in own_paths & paths.keys():
            del paths[name]

        # Omit the parents of other paths, and flat copies of the names in paths.
        parents: set[str] = set()
        levels: set[str] = set()
        for keyword in paths.values():
            parents.update(paths_of(keyword)[:-1])
            levels.update(keyword)
        keywords = [keyword for name, keyword in paths.items() if name not in parents]
        for name in self.flat:
            if name not in levels and name not in own_names:
                keywords.append((name,))

        people: list[Keyword] = [(name,) for name in self.persons]
        # Programs write the names of faces to the lists of keywords, too, where nothing marks them
        # as people.
        persons = {name.casefold() for name in self.persons}
        content = []
        internal = []
        for keyword in keywords:
            root = keyword[0].casefold() if len(keyword) > 1 else ""
            if root in _PROGRAMS or _PROGRAM_TAG.fullmatch(keyword[-1]):
                internal.append(keyword)
            elif root in _NOT_CONTENT or keyword[-1].casefold() in persons:
                people.append(keyword)
            else:
                content.append(keyword)
        return PhotoKeywords(
            content=tuple(content),
            people=tuple(dict.fromkeys(people)),
            internal=tuple(internal),
            own=tuple(self.own),
            listed=tuple(keyword for keyword in keywords if keyword not in internal),
            repaired=tuple(self.repaired),
            taken=self.taken,
        )


def _levels(text: str, separator: str) -> Keyword:
    """Split a keyword into its levels.

    Names may contain the separators of other lists ("AC/DC"), unless the first level is a top-level
    keyword of people, albums or programs, which are written with any separator to any list. A colon
    may also mean a family in biology.
    """
    parts = [part.strip() for part in _SEPARATORS.split(text)]
    root = parts[0].casefold()
    if root not in _NOT_CONTENT | _PROGRAMS or (root in GROUPS and ":" in text):
        parts = [part.strip() for part in text.split(separator)]
    return tuple(part for part in parts if part)


def _separate(texts: list[str]) -> list[str]:
    """Separate the keywords of programs that write all of them to one item, such as "dog;beach".

    With several items, a semicolon is a part of a name.
    """
    return texts[0].split(";") if len(texts) == 1 else texts


def _embedded_keywords(image: ImageFile) -> list[str]:
    """Return the keywords in IPTC 2:25 and EXIF XPKeywords. Damaged IPTC or EXIF data has none."""
    texts = []
    with suppress(Exception):
        iptc = getiptcinfo(image) or {}
        values = iptc.get((2, 25))
        is_utf8 = iptc.get((1, 90)) == _UTF8
        for value in values if isinstance(values, list) else [values]:
            # Pillow returns None for an empty record.
            content = value or b""
            # Without a declared encoding, a text is UTF-8 or Windows-1252.
            try:
                texts.append(content.decode("utf-8"))
            except UnicodeDecodeError:
                texts.append(content.decode("utf-8" if is_utf8 else "cp1252", "replace"))
    texts = _separate(texts)
    with suppress(Exception):
        value = bytes(image.getexif().get(Base.XPKeywords, b""))
        texts += _separate([value.decode("utf-16-le", "replace").partition("\0")[0]])
    return texts


def _capture(image: Image.Image) -> tuple[str, float] | None:
    """Return the camera model and the capture time of an image, if its EXIF data has both."""
    try:
        exif = image.getexif()
        details = exif.get_ifd(IFD.Exif)
        time = datetime.strptime(details[Base.DateTimeOriginal], "%Y:%m:%d %H:%M:%S")
        fraction = details.get(Base.SubsecTimeOriginal, "").strip("\0 ")
        seconds = time.replace(tzinfo=UTC).timestamp() + float(f"0.{fraction}")
        return str(exif[Base.Model]), seconds
    except Exception:
        # Damaged EXIF data raises various exceptions. Keywords do not depend on it.
        return None


def _names_of_regions(root: Element) -> Iterator[str]:
    def field(element: Element, tag: str) -> str:
        """Return a field of a region, which is an attribute or an element."""
        return _clean(element.get(tag) or element.findtext(tag) or "")

    for element in root.iter():
        name = field(element, f"{_REGION}Name")
        if name and field(element, f"{_REGION}Type") in ("Face", "Pet"):
            yield name
        person = field(element, _DISPLAY_NAME)
        if person:
            yield person


def _clean(text: str) -> str:
    """Repair the encoding, normalize Unicode and whitespace, so that copies are equal."""
    return " ".join(normalize("NFC", _repair(text)).split())


def _repair(text: str) -> str:
    """Decode UTF-8 that was read as Windows-1252 and encoded again, such as "GÃ¤rten".

    Windows-1252 leaves some bytes undefined, which programs read as in Latin-1. Other texts are not
    valid UTF-8 in these encodings, and are not changed.
    """
    if text.isascii():
        return text
    content = b""
    try:
        for letter in text:
            content += letter.encode("latin-1" if ord(letter) < 256 else "cp1252")
        decoded = content.decode()
    except UnicodeError:
        return text
    return decoded if decoded == text else _repair(decoded)
