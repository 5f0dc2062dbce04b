"""XMP sidecars with keywords for photo managers: photo.jpg.xmp. Photos are not changed.

Source: XMP specification parts 1 and 3 (ISO 16684-1); the namespace of digiKam as in its sidecars.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat
from xml.sax.saxutils import escape

from mldec.errors import ConfigError, DataError, naming_errors
from mldec.files.atomic import replacing
from mldec.tools.predict.answers import Row

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
# Properties: name, namespace and kind of list. Lists of digiKam and Lightroom may contain paths,
# such as "Places/Paris" and "Places|Paris". digiKam prefers its own list. `OWN` has the keywords
# that earlier runs added.
SUBJECT = ("dc:subject", "http://purl.org/dc/elements/1.1/", "Bag")
DIGIKAM = ("digiKam:TagsList", "http://www.digikam.org/ns/1.0/", "Seq")
LIGHTROOM = ("lr:hierarchicalSubject", "http://ns.adobe.com/lightroom/1.0/", "Bag")
OWN = ("mldec:keywords", "urn:mldec:xmp:1.0/", "Bag")
PROPERTIES = (SUBJECT, DIGIKAM, LIGHTROOM, OWN)
EMPTY = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{RDF}">'
    '</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)
_TAG = re.compile(rb"""<([^\s/>]+)(?:"[^"]*"|'[^']*'|[^"'>])*>""")


def write_sidecar(row: Row) -> Path | None:
    """Write the predicted classes of an image file as keywords to its sidecar.

    Keywords of an earlier call are replaced. Keywords of the user, all other bytes, the mode, the
    owner and a link to the sidecar are kept.

    Returns:
        Path of the sidecar. None if the row has an error, or no classes and no earlier sidecar.

    Raises:
        ConfigError: If the image is part of another file.
        DataError: If the sidecar cannot be read or written.
    """
    if row.error is not None:
        return None
    if row.path is None or not Path(row.path).is_file():
        raise ConfigError(f"--xmp: {row.image} is not an image file; omit --xmp")

    photo = Path(row.path)
    path = photo.with_name(f"{photo.name}.xmp")
    names = list(dict.fromkeys(prediction.name.strip() for prediction in row.predictions))
    with naming_errors(path, DataError, remedy="restore it, or move it away"):
        target = Path(os.path.realpath(path))
        before = b""
        if target.exists():
            before = target.read_bytes()
        if not names and not before:
            return None
        content = with_keywords(before or EMPTY.encode(), names)
        if content != before:
            with replacing(target, of_user=True) as file:
                file.write(content)
    return path


@dataclass
class _Keywords:
    """The items of a list in a sidecar, with byte offsets."""

    items: list[tuple[str, int, int]] = field(default_factory=list)  # text, start and end
    end: int | None = None  # where further items are inserted; None without a list
    empty_tag: int | None = None  # start of the tag of an empty list, such as <rdf:Bag/>
    prefix: str = ""  # of the RDF namespace in the list
    space: bytes = b""  # between two items

    def texts(self) -> set[str]:
        return {text for text, _, _ in self.items}


def with_keywords(content: bytes, names: Sequence[str]) -> bytes:
    """Return a sidecar in which `names` replace the keywords of an earlier run."""
    sidecar = _Sidecar(content)
    properties = sidecar.properties

    # Names that the user has added to any list, also as the last part of a path, are not replaced.
    earlier = properties[OWN].texts()
    of_user = properties[SUBJECT].texts() - earlier
    for kind, separator in ((DIGIKAM, "/"), (LIGHTROOM, "|")):
        paths = properties[kind].texts() - earlier
        of_user |= paths | {path.rpartition(separator)[2].strip() for path in paths}
    ours = [name for name in names if name not in of_user]

    edits = []
    new_lists = ""
    for kind in (SUBJECT, DIGIKAM, OWN):
        keywords = properties[kind]
        removed = earlier if kind == OWN else earlier - of_user
        for text, start, end in keywords.items:
            if text in removed and text not in ours:
                edits.append((start, end, b""))
        added = [name for name in ours if name not in keywords.texts()]
        if added and keywords.end is None:
            new_lists += _new_list(kind, added)
        elif added:
            edits.append(_insertion(content, keywords, added))
    if new_lists:
        sidecar.rdf.prefix = ""
        edits.append(_insertion(content, sidecar.rdf, [], new_lists.encode()))

    for start, end, inserted in sorted(edits, reverse=True):
        content = content[:start] + inserted + content[end:]
    _Sidecar(content)  # raises an error if the result is not valid
    return content


class _Sidecar:
    """The keyword lists of a UTF-8 sidecar, and the element `rdf` for new lists."""

    def __init__(self, content: bytes) -> None:
        self.properties = {}
        self._by_name = {}  # the same, by the names of the parser
        for kind in PROPERTIES:
            name, namespace, _ = kind
            self.properties[kind] = _Keywords()
            self._by_name[f"{namespace} {name.partition(':')[2]}"] = self.properties[kind]
        self.rdf = _Keywords()
        self._content = content
        self._stack: list[tuple[str, int]] = []  # names and offsets of the open elements
        self._text = ""

        self._parser = expat.ParserCreate("utf-8", " ")
        self._parser.XmlDeclHandler = self._declaration
        self._parser.StartElementHandler = self._start
        self._parser.CharacterDataHandler = self._data
        self._parser.EndElementHandler = self._end
        content.decode()  # raises an error for UTF-16
        self._parser.Parse(content, True)
        if self.rdf.end is None:
            raise ValueError("it has no rdf:RDF")

    def _declaration(self, version: str, encoding: str | None, standalone: int) -> None:
        if encoding is not None and encoding.lower() != "utf-8":
            raise ValueError(f"its encoding is {encoding}, not UTF-8")

    def _property(self, depth: int) -> _Keywords | None:
        """Return the keywords of an open element, 1 for the innermost; None if no property."""
        if len(self._stack) < depth:
            return None
        return self._by_name.get(self._stack[-depth][0])

    def _start(self, name: str, attributes: object) -> None:
        keywords = self._property(1)
        offset = self._parser.CurrentByteIndex
        self._stack.append((name, offset))
        self._text = ""
        if name == f"{RDF} RDF":
            keywords = self.rdf
        if keywords is not None and keywords.end is None:
            tag = _tag(self._content, offset)
            keywords.end = tag.end()
            keywords.prefix = tag[1].decode().rpartition(":")[0]
            if tag[0].endswith(b"/>"):
                keywords.empty_tag = offset

    def _data(self, text: str) -> None:
        self._text += text

    def _end(self, name: str) -> None:
        own = self._property(1)
        if own is not None and own.end is None:
            raise ValueError(f"{name} is not a list")
        _, start = self._stack.pop()
        if name == f"{RDF} RDF" and self.rdf.empty_tag is None:
            self.rdf.end = self._parser.CurrentByteIndex

        # An item is in a list, which is in a property.
        keywords = self._property(2)
        if name != f"{RDF} li" or keywords is None:
            return

        # Include preceding white space, so that a removed item leaves no empty line.
        tag = _tag(self._content, start)
        begin = len(self._content[:start].rstrip())
        end = tag.end()
        if not tag[0].endswith(b"/>"):
            end = self._content.index(b">", self._parser.CurrentByteIndex) + 1
        if keywords.end == begin:
            keywords.end = end
            keywords.space = self._content[begin:start]
        keywords.items.append((self._text.strip(), begin, end))


def _tag(content: bytes, start: int) -> re.Match[bytes]:
    """Return the start tag at an offset."""
    tag = _TAG.match(content, start)
    assert tag is not None
    return tag


def _insertion(
    content: bytes, keywords: _Keywords, names: Sequence[str], text: bytes = b""
) -> tuple[int, int, bytes]:
    """Return the edit (start, end, new bytes) that adds `text` and one item per name to a list."""
    name = f"{keywords.prefix}:li" if keywords.prefix else "li"
    for keyword in names:
        text += keywords.space + f"<{name}>{escape(keyword)}</{name}>".encode()
    assert keywords.end is not None
    if keywords.empty_tag is None:
        return keywords.end, keywords.end, text
    tag = _tag(content, keywords.empty_tag)
    opening = tag[0].removesuffix(b"/>") + b">"
    return tag.start(), tag.end(), opening + text + b"</" + tag[1] + b">"


def _new_list(kind: tuple[str, str, str], names: Sequence[str]) -> str:
    """Return the XML of a property with a list."""
    name, namespace, form = kind
    items = "".join(f"<rdf:li>{escape(keyword)}</rdf:li>" for keyword in names)
    return (
        f'<rdf:Description xmlns:rdf="{RDF}" rdf:about=""'
        f' xmlns:{name.partition(":")[0]}="{namespace}">'
        f"<{name}><rdf:{form}>{items}</rdf:{form}></{name}></rdf:Description>"
    )
