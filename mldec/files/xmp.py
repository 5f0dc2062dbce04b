"""Keyword lists of XMP packets: changes that keep all other bytes.

Source: XMP specification parts 1 and 3 (ISO 16684-1); the namespace of digiKam as in its sidecars.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.parsers import expat
from xml.sax.saxutils import escape

Kind = tuple[str, str, str]  # a property: name, namespace and kind of list
Keyword = tuple[str, ...]  # a keyword with its parents, such as ("Places", "Paris")
Edit = tuple[int, int, bytes]  # start and end of the replaced bytes, and the new bytes

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
NAMESPACE = "urn:mldec:xmp:1.0/"

# Lists of keywords. digiKam prefers its own one.
SUBJECT = ("dc:subject", "http://purl.org/dc/elements/1.1/", "Bag")
DIGIKAM = ("digiKam:TagsList", "http://www.digikam.org/ns/1.0/", "Seq")
LIGHTROOM = ("lr:hierarchicalSubject", "http://ns.adobe.com/lightroom/1.0/", "Bag")
LISTS = (SUBJECT, DIGIKAM, LIGHTROOM)
# Records of what mldec added. OWN: keywords as paths. ITEMS: the items of the lists, after the name
# of the list, such as "dc:subject dog". COPIES: copies of the user's keywords, in the same form.
# EMPTY_LISTS: the user's lists that had no items.
OWN = ("mldec:keywords", NAMESPACE, "Bag")
ITEMS = ("mldec:items", NAMESPACE, "Bag")
COPIES = ("mldec:copies", NAMESPACE, "Bag")
EMPTY_LISTS = ("mldec:emptyLists", NAMESPACE, "Bag")
RECORDS = (OWN, ITEMS, COPIES, EMPTY_LISTS)

EMPTY = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{RDF}">'
    '</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
).encode()
_TAG = re.compile(rb"""<([^\s/>]+)(?:"[^"]*"|'[^']*'|[^"'>])*>""")


def with_keywords(
    content: bytes, keywords: Sequence[Keyword], *, of_photo: Sequence[Keyword] = ()
) -> bytes:
    """Return a packet with further keywords in all lists.

    Applications read only one of the lists. A new list therefore starts with the keywords
    `of_photo`, which the user has given to the photo.
    """
    rdf = _parse(content)
    found: dict[Kind, _Element] = {}
    for kind, element in _properties(rdf.children):
        if not element.children:
            raise ValueError(f"{kind[0]} is not a list")
        found.setdefault(kind, element.children[0])

    edits = []
    new_lists: dict[Kind, list[str]] = {kind: [] for kind in RECORDS}
    new_lists[OWN] = ["/".join(keyword) for keyword in keywords]
    for kind in LISTS:
        if kind in found:
            present = [item.text for item in found[kind].children]
        else:
            present = list(dict.fromkeys(_text(kind, keyword) for keyword in of_photo))
            new_lists[COPIES] += [f"{kind[0]} {text}" for text in present]
        texts = dict.fromkeys(_text(kind, keyword) for keyword in keywords)
        added = [text for text in texts if text not in present]
        new_lists[ITEMS] += [f"{kind[0]} {text}" for text in added]
        if kind not in found:
            new_lists[kind] = present + added
        elif added:
            edits.append(_insertion(content, found[kind], added))
            if not present:
                new_lists[EMPTY_LISTS].append(kind[0])
    edits.append(_insertion(content, rdf, [], _description(new_lists)))
    return _edited(content, edits)


def without_own(content: bytes) -> tuple[bytes, list[str]]:
    """Remove the items that `with_keywords` added, and the records.

    Copies of the user's keywords stay in a list that the user has edited.
    Lists and descriptions that become empty are removed, unless the user had an empty list.

    Returns:
        The packet, and the removed keywords as paths, such as "Suggested/dog".
    """
    if NAMESPACE.encode() not in content:
        return content, []
    rdf = _parse(content)
    texts: dict[Kind, list[str]] = {kind: [] for kind in LISTS + RECORDS}
    for kind, element in _properties(rdf.children):
        texts[kind] += [item.text for item in element.items()]
    items = set(texts[ITEMS])
    copies = set(texts[COPIES])

    # The user may have moved one of our keywords to another parent since. Keep its name.
    for kind, separator in ((DIGIKAM, "/"), (LIGHTROOM, "|")):
        for text in texts[kind]:
            if f"{kind[0]} {text}" not in items | copies:
                items.discard(f"{SUBJECT[0]} {text.rpartition(separator)[2].strip()}")

    removed: list[_Element] = []
    for description in rdf.children:
        empty = []
        for kind, element in _properties([description]):
            ours = []
            copied = []
            for item in element.items():
                if f"{kind[0]} {item.text}" in items:
                    ours.append(item)
                elif f"{kind[0]} {item.text}" in copies:
                    copied.append(item)
            # Keep the copies in a list that the user has edited, for example by accepting a
            # suggestion. Without them, the list would hide the keywords of the photo.
            if len(ours) + len(copied) == len(element.items()):
                ours += copied
            is_empty = ours and len(ours) == len(element.items())
            if kind in RECORDS or (is_empty and kind[0] not in texts[EMPTY_LISTS]):
                empty.append(element)
            else:
                removed += ours
        if empty and empty == description.children and not description.has_attributes:
            empty = [description]
        removed += empty
    edits = [(_start(content, element), element.end, b"") for element in removed]
    return _edited(content, edits), texts[OWN]


@dataclass(eq=False)
class _Element:
    """An element of a packet, with byte offsets."""

    name: str  # with the namespace
    tag: re.Match[bytes]  # the start tag
    has_attributes: bool  # apart from rdf:about
    end: int = 0
    text: str = ""
    children: list["_Element"] = field(default_factory=list)

    def items(self) -> list["_Element"]:
        """Return the items in the list of a property."""
        return self.children[0].children if self.children else []


def _parse(content: bytes) -> _Element:
    """Return the element rdf:RDF of a UTF-8 packet."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("only UTF-8 can be changed: save it as UTF-8") from error
    parser = expat.ParserCreate("utf-8", " ")
    elements: list[_Element] = []
    path: list[_Element] = []  # the open elements

    def declaration(version: str, encoding: str | None, standalone: int) -> None:
        if encoding is not None and encoding.lower() != "utf-8":
            raise ValueError(f"its encoding is {encoding}, not UTF-8")

    def start(name: str, attributes: dict[str, str]) -> None:
        tag = _TAG.match(content, parser.CurrentByteIndex)
        assert tag is not None
        element = _Element(name, tag, bool(attributes.keys() - {f"{RDF} about"}))
        if path:
            path[-1].children.append(element)
        path.append(element)
        elements.append(element)

    def data(text: str) -> None:
        path[-1].text += text

    def end(name: str) -> None:
        element = path.pop()
        element.text = element.text.strip()
        element.end = element.tag.end()
        if not element.tag[0].endswith(b"/>"):
            element.end = content.index(b">", parser.CurrentByteIndex) + 1

    parser.XmlDeclHandler = declaration
    parser.StartElementHandler = start
    parser.CharacterDataHandler = data
    parser.EndElementHandler = end
    parser.Parse(content, True)
    for element in elements:
        if element.name == f"{RDF} RDF":
            return element
    raise ValueError("it has no rdf:RDF")


def _start(content: bytes, element: _Element) -> int:
    """Return the start of the white space before an element. Its removal leaves no empty line."""
    return len(content[: element.tag.start()].rstrip())


def _properties(descriptions: Sequence[_Element]) -> list[tuple[Kind, _Element]]:
    properties = []
    for description in descriptions:
        for element in description.children:
            for kind in LISTS + RECORDS:
                if element.name == f"{kind[1]} {kind[0].partition(':')[2]}":
                    properties.append((kind, element))
    return properties


def _text(kind: Kind, keyword: Keyword) -> str:
    if kind == SUBJECT:
        return keyword[-1]
    if kind == DIGIKAM:
        return "/".join(keyword)
    # Lightroom permits a slash in a name.
    return "|".join(name.replace("|", "/") for name in keyword)


def _insertion(content: bytes, parent: _Element, names: Sequence[str], text: bytes = b"") -> Edit:
    """Return the edit that appends `text` and one item per name to an element."""
    position = parent.tag.end()
    space = b""
    if parent.children:
        last = parent.children[-1]
        position = last.end
        space = content[_start(content, last) : last.tag.start()]

    prefix = parent.tag[1].decode().rpartition(":")[0]
    name = f"{prefix}:li" if prefix else "li"
    for keyword in names:
        text += space + f"<{name}>{escape(keyword)}</{name}>".encode()
    if not parent.tag[0].endswith(b"/>"):
        return position, position, text
    opening = parent.tag[0].removesuffix(b"/>") + b">"
    return parent.tag.start(), parent.tag.end(), opening + text + b"</" + parent.tag[1] + b">"


def _description(lists: Mapping[Kind, Sequence[str]]) -> bytes:
    # Exiv2 raises an error if a namespace has two prefixes. Declare only the used namespaces.
    declared = {f'xmlns:rdf="{RDF}"': None}
    text = ""
    for (name, namespace, form), names in lists.items():
        if not names:
            continue
        declared[f'xmlns:{name.partition(":")[0]}="{namespace}"'] = None
        items = "".join(f"<rdf:li>{escape(keyword)}</rdf:li>" for keyword in names)
        text += f"<{name}><rdf:{form}>{items}</rdf:{form}></{name}>"
    return f'<rdf:Description {" ".join(declared)} rdf:about="">{text}</rdf:Description>'.encode()


def _edited(content: bytes, edits: Sequence[Edit]) -> bytes:
    """Return the packet after the edits. Raises an error if it is not valid XML."""
    for start, end, inserted in sorted(edits, reverse=True):
        content = content[:start] + inserted + content[end:]
    _parse(content)
    return content
