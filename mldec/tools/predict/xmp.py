"""Keywords for photo managers: the sidecar of a photo, photo.jpg.xmp; the photo is not touched.

Source: XMP specification parts 1 and 3 (ISO 16684-1); digiKam's namespace as in its own sidecars.
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
# Property -> its namespace and the kind of its list. digiKam reads its own list before the common
# one. It may hold paths such as "Places/Paris", as Lightroom's does ("Places|Paris"). Our own list
# records the keywords that an earlier run added.
SUBJECT = ("dc:subject", "http://purl.org/dc/elements/1.1/", "Bag")
DIGIKAM = ("digiKam:TagsList", "http://www.digikam.org/ns/1.0/", "Seq")
LIGHTROOM = ("lr:hierarchicalSubject", "http://ns.adobe.com/lightroom/1.0/", "Bag")
OWN = ("mldec:keywords", "urn:mldec:xmp:1.0/", "Bag")
EMPTY = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{RDF}">'
    '</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)
_KINDS = (SUBJECT, DIGIKAM, LIGHTROOM, OWN)
_TAG = re.compile(rb"""<([^\s/>]+)(?:"[^"]*"|'[^']*'|[^"'>])*>""")
_ENCODING = re.compile(rb"""<\?xml[^>]*encoding=["']([\w.-]+)""")


def write_sidecar(row: Row) -> Path | None:
    """Write the classes in the answer for an image file to its sidecar, and return the path.

    Keywords of the user stay as they are, and those that an earlier call added are replaced. All
    other bytes of the sidecar are kept, and so are its mode, its owner and a link to it. Returns
    None after an error, or if there is neither a class nor a sidecar.

    Raises:
        ConfigError: if the image is not a file of its own.
        DataError: if the sidecar cannot be read or written.
    """
    if row.error is not None:
        return None
    if row.path is None or not Path(row.path).is_file():
        raise ConfigError(f"--xmp: {row.image} is not a file of its own; leave --xmp out")

    photo = Path(row.path)
    path = photo.with_name(f"{photo.name}.xmp")
    names = list(dict.fromkeys(prediction.name.strip() for prediction in row.predictions))
    with naming_errors(path, DataError, remedy="restore it, or move it away"):
        target = Path(os.path.realpath(path))
        before = target.read_bytes() if target.exists() else b""
        if not names and not before:
            return None
        content = with_keywords(before or EMPTY.encode(), names)
        if content != before:
            with replacing(target, of_user=True) as file:
                file.write(content)
    return path


@dataclass
class _Keywords:
    """The items of a property in a sidecar, and where further ones belong, by byte offsets."""

    items: list[tuple[str, int, int]] = field(default_factory=list)  # text, start and end
    end: int | None = None  # where further items are inserted; None without a list
    empty_tag: int | None = None  # start of the tag of an empty list, such as <rdf:Bag/>
    prefix: str = ""  # of the RDF namespace in the list
    space: bytes = b""  # between two items

    def texts(self) -> set[str]:
        return {text for text, _, _ in self.items}


def with_keywords(content: bytes, names: Sequence[str]) -> bytes:
    """Return a sidecar in which the keywords of an earlier run are replaced by these."""
    encoding = _encoding(content)
    content = content.decode(encoding).encode()
    properties, rdf = _parse(content)

    # A keyword that the user has in any list, alone or at the end of a path, is not ours.
    earlier = properties[OWN].texts()
    of_user = properties[SUBJECT].texts() - earlier
    for kind, separator in ((DIGIKAM, "/"), (LIGHTROOM, "|")):
        paths = properties[kind].texts() - earlier
        of_user |= paths | {path.rpartition(separator)[2].strip() for path in paths}
    ours = [name for name in names if name not in of_user]

    edits = []
    new_lists = ""
    for kind, removed in (
        (SUBJECT, earlier - of_user),
        (DIGIKAM, earlier - of_user),
        (OWN, earlier),
    ):
        keywords = properties[kind]
        for text, start, end in keywords.items:
            if text in removed and text not in ours:
                edits.append((start, end, b""))
        added = [name for name in ours if name not in keywords.texts()]
        if added and keywords.end is None:
            new_lists += _new_list(kind, added)
        elif added:
            edits.append(_insertion(content, keywords, added))
    if new_lists:
        rdf.prefix = ""
        edits.append(_insertion(content, rdf, [], new_lists.encode()))

    for start, end, inserted in sorted(edits, reverse=True):
        content = content[:start] + inserted + content[end:]
    _parse(content)
    return content.decode().encode(encoding, "xmlcharrefreplace")


def _encoding(content: bytes) -> str:
    """Return the encoding of an XML file, which keeps a byte order mark as a character."""
    if content.startswith(b"\xff\xfe"):
        return "utf-16-le"
    if content.startswith(b"\xfe\xff"):
        return "utf-16-be"
    declared = _ENCODING.search(content[:200])
    return declared[1].decode() if declared else "utf-8"


def _parse(content: bytes) -> tuple[dict[tuple[str, str, str], _Keywords], _Keywords]:
    """Return the lists of keywords of a sidecar in UTF-8, and the place of further properties."""
    known = {f"{kind[1]} {kind[0].partition(':')[2]}": kind for kind in _KINDS}
    properties = {kind: _Keywords() for kind in _KINDS}
    present = []
    rdf = _Keywords()
    parser = expat.ParserCreate("utf-8", " ")
    stack: list[str] = []
    starts: list[int] = []
    text = ""

    def start(name: str, _: object) -> None:
        nonlocal text
        stack.append(name)
        starts.append(parser.CurrentByteIndex)
        text = ""
        if name in known:
            present.append(known[name])
        is_list = len(stack) > 1 and stack[-2] in known
        keywords = properties[known[stack[-2]]] if is_list else rdf
        if (is_list or name == f"{RDF} RDF") and keywords.end is None:
            tag = _tag(content, starts[-1])
            keywords.end = tag.end()
            keywords.prefix = tag[1].decode().rpartition(":")[0]
            if tag[0].endswith(b"/>"):
                keywords.empty_tag = tag.start()

    def data(characters: str) -> None:
        nonlocal text
        text += characters

    def end(name: str) -> None:
        first = starts.pop()
        stack.pop()
        if name == f"{RDF} RDF" and rdf.empty_tag is None:
            rdf.end = parser.CurrentByteIndex
        if name != f"{RDF} li" or len(stack) < 2 or stack[-2] not in known:
            return
        keywords = properties[known[stack[-2]]]
        tag = _tag(content, first)
        last = tag.end()
        if not tag[0].endswith(b"/>"):
            last = content.index(b">", parser.CurrentByteIndex) + 1
        # White space before an item belongs to it, so that removing it leaves no empty line.
        begin = len(content[:first].rstrip())
        if keywords.end == begin:
            keywords.end = last
            keywords.space = content[begin:first]
        keywords.items.append((text.strip(), begin, last))

    parser.StartElementHandler = start
    parser.CharacterDataHandler = data
    parser.EndElementHandler = end
    parser.Parse(content, True)
    if rdf.end is None:
        raise ValueError("it has no rdf:RDF")
    for kind in present:
        if properties[kind].end is None:
            raise ValueError(f"{kind[0]} is not a list")
    return properties, rdf


def _tag(content: bytes, start: int) -> re.Match[bytes]:
    """Return the start tag at a place."""
    tag = _TAG.match(content, start)
    assert tag is not None
    return tag


def _insertion(
    content: bytes, keywords: _Keywords, names: Sequence[str], text: bytes = b""
) -> tuple[int, int, bytes]:
    """Return the edit that adds items, or other content, to a list."""
    name = f"{keywords.prefix}:li" if keywords.prefix else "li"
    for keyword in names:
        text += keywords.space + f"<{name}>{escape(keyword)}</{name}>".encode()
    assert keywords.end is not None
    if keywords.empty_tag is None:
        return keywords.end, keywords.end, text
    tag = _tag(content, keywords.empty_tag)
    opened = tag[0].removesuffix(b"/>") + b">"
    return tag.start(), tag.end(), opened + text + b"</" + tag[1] + b">"


def _new_list(kind: tuple[str, str, str], names: Sequence[str]) -> str:
    """Return the XML of a property that the sidecar lacks."""
    name, namespace, form = kind
    items = "".join(f"<rdf:li>{escape(keyword)}</rdf:li>" for keyword in names)
    return (
        f'<rdf:Description xmlns:rdf="{RDF}" rdf:about=""'
        f' xmlns:{name.partition(":")[0]}="{namespace}">'
        f"<{name}><rdf:{form}>{items}</rdf:{form}></{name}></rdf:Description>"
    )
