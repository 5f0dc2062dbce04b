"""Keywords for photo managers: the sidecar of a photo, photo.jpg.xmp; the photo is not touched.

Source: XMP specification parts 1 and 3 (ISO 16684-1); digiKam's namespace as in its own sidecars.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.dom import minidom

from mldec.errors import DataError, refusing
from mldec.predict.answers import Row
from mldec.runtime.results import write_file

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
# Property -> its namespace, and the kind of its list. digiKam reads its own list before the common
# one, which may hold paths such as "Places/Paris". Ours remembers what an earlier run added.
SUBJECT = ("dc:subject", "http://purl.org/dc/elements/1.1/", "Bag")
DIGIKAM = ("digiKam:TagsList", "http://www.digikam.org/ns/1.0/", "Seq")
OWN = ("mldec:keywords", "urn:mldec:xmp:1.0/", "Bag")
EMPTY = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{RDF}">'
    '</rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)


def write_sidecar(row: Row) -> Path | None:
    """Write the classes in the answer for an image file to its sidecar, and return the path.

    Keywords of others stay, and those that an earlier call added are replaced. A sidecar that says
    so already is left as it is, and none is made without a class; None after an error. Raises a
    `DataError` if the image is no file of its own, or the sidecar cannot be read or written.
    """
    if row.error is not None:
        return None
    photo = Path(row.image)
    if not photo.is_file():
        raise DataError(f"--xmp: {row.image} is no file of its own, beside which a sidecar can lie")

    path = photo.with_name(f"{photo.name}.xmp")
    names = list(dict.fromkeys(prediction.name.strip() for prediction in row.predictions))
    if not names and not path.exists():
        return None

    with refusing(path, DataError, remedy="restore it, or move it away"):
        before = path.read_bytes() if path.exists() else b""
        document = minidom.parseString(before or EMPTY.encode())
        _set_keywords(document, names)
        content = document.toxml(encoding="utf-8")
    if content != before:
        write_file(path, content)
    return path


# Any: the classes of minidom have no types that help.
def _set_keywords(document: Any, names: Sequence[str]) -> None:
    """Replace the keywords of an earlier run by these, in all lists."""
    earlier = {_text(item) for item in _elements(document, OWN, "li")}
    others = {_text(item) for item in _elements(document, SUBJECT, "li")} - earlier

    _change(document, SUBJECT, earlier, names)
    _change(document, DIGIKAM, earlier, names)
    # A keyword that somebody else had set is not ours to remove.
    _change(document, OWN, earlier, [name for name in names if name not in others])


def _change(
    document: Any, kind: tuple[str, str, str], removed: set[str], names: Sequence[str]
) -> None:
    """Remove some items of a list, which is made if it is not there, and add names it lacks."""
    kept = set()
    for item in _elements(document, kind, "li"):
        if _text(item) in removed:
            item.parentNode.removeChild(item)
        else:
            kept.add(_text(item))

    added = [name for name in names if name not in kept]
    containers = _elements(document, kind, kind[2])
    if added and not containers:
        name, namespace, form = kind
        [rdf, *_] = document.getElementsByTagNameNS(RDF, "RDF")
        description = rdf.appendChild(document.createElementNS(RDF, "rdf:Description"))
        description.setAttributeNS(RDF, "rdf:about", "")
        element = description.appendChild(document.createElementNS(namespace, name))
        element.setAttribute(f"xmlns:{name.partition(':')[0]}", namespace)
        containers = [element.appendChild(document.createElementNS(RDF, f"rdf:{form}"))]
    for name in added:
        item = containers[0].appendChild(document.createElementNS(RDF, "rdf:li"))
        item.appendChild(document.createTextNode(name))


def _elements(document: Any, kind: tuple[str, str, str], tag: str) -> list[Any]:
    """Return the elements of RDF with a tag in a list, wherever the file has it."""
    name, namespace, _ = kind
    found = document.getElementsByTagNameNS(namespace, name.partition(":")[2])
    return [item for element in found for item in element.getElementsByTagNameNS(RDF, tag)]


def _text(item: Any) -> str:
    return "".join(node.data for node in item.childNodes if node.nodeType == node.TEXT_NODE).strip()
