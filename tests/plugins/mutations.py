"""Strategies: random settings, and changes of bytes, trees of values, text tables and arrays.

A change is plain data, so that the message of a failing test shows it; functions here apply it.
"""

import csv
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

Path = tuple[Any, ...]  # of keys and indices into a tree of dictionaries and lists

# In a name: controls, escapes, right-to-left marks, letters that differ in case or normal form.
NAMES = [
    *(
        "",
        " ",
        "dog",
        "DOG",
        "cat;dog",
        "dog;dog",
        "a\tb",
        "a\nb",
        "a\r",
        "\x00",
        "a\x00b",
        "\x1b[31m",
        "\x7f",
        "\x85",
    ),
    *(
        "\u202e",
        "\u2028",
        "\ufeff",
        "e\u0301",
        "\xe9",
        "\u65e5",
        "..",
        "../x",
        "/etc/passwd",
        "C:x",
        "a\\b",
        "a/../b",
    ),
    *(
        "1",
        "1.5",
        "nan",
        "None",
        "true",
        "#",
        '"',
        "'",
        ",",
        "'; --",
        "{}",
        "%s",
        "${name}",
        "x" * 300,
        "x" * 140_000,
    ),
]
NUMBERS = [
    *(
        0,
        1,
        -1,
        2,
        3,
        7,
        255,
        2**31,
        2**53,
        2**63,
        10**6,
        10**12,
        10**20,
        -(10**12),
        0.5,
        -0.5,
        1.5,
        1e-6,
        1e-300,
    ),
    *(1e300, float("nan"), float("inf"), -float("inf")),
]


def names() -> SearchStrategy[str]:
    """Return odd names, and any text without lone surrogates."""
    return weighted((3, st.sampled_from(NAMES)), (1, st.text(max_size=12)))


def weighted(*branches: tuple[int, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    """Return a choice between strategies by their weights; `|` has no weights."""
    choices = [strategy for weight, strategy in branches for _ in range(weight)]
    return st.integers(0, len(choices) - 1).flatmap(lambda place: choices[place])


def few(one: SearchStrategy[Any]) -> SearchStrategy[list[Any]]:
    """Return one change, most of the time: a second one is often not reached."""
    return weighted(
        (3, one.map(lambda change: [change])), (1, st.lists(one, min_size=2, max_size=4))
    )


# --- settings -------------------------------------------------------------------------------------

FRAGMENTS = [
    *(
        "",
        " ",
        "null",
        "~",
        "true",
        "yes",
        "[]",
        "[1,2]",
        "[[",
        "[",
        "]",
        "{",
        "}",
        "{}",
        "{a:1}",
        "{a:{b:2}}",
        "{a",
    ),
    *(
        "'",
        '"',
        "'x",
        "\\",
        "\\,",
        "a: b",
        "a:b:c",
        "- x",
        "---",
        "...",
        "|",
        ">",
        "&a",
        "*a",
        "!!int x",
        "!x",
        "? a",
    ),
    *(
        "!!python/object/apply:os.getcwd []",
        "@",
        "`",
        "%",
        "\t",
        "#",
        "<<",
        "=",
        "a=b",
        ",",
        "1,2",
        "x,",
        "(",
        "sum(1)",
    ),
    *(
        "choice(1,2)",
        "range(1,3)",
        "sort(2,1)",
        "${",
        "${}",
        "${name}",
        "${train}",
        "${nope}",
        "${oc.env:NOPE_}",
    ),
    *(
        "${oc.env:HOME}",
        "${.}",
        "${..name}",
        "${hydra:run.dir}",
        "${oc.decode:x}",
        "${a:${b}}",
        "$",
        "\\${x}",
        "???",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e-400",
        "0x10",
        "1_000",
        "0b1",
        "1:30",
        "2020-01-01",
        "9" * 5000,
        "[" * 500,
    ),
    *(
        "cpu",
        "cuda",
        "cuda:99",
        "cpu:x",
        "cuda:-1",
        "auto",
        "fp16",
        "bf16",
        "adam",
        "sgd",
        "cosine",
        "elem",
        "skip",
    ),
    *(
        "gap",
        "digits",
        "digits_single",
        "digits_zsl",
        "csv",
        "coco",
        "asl",
        "bce",
        "cross_entropy",
        "partial",
        "tiny",
    ),
    *(
        "ml_decoder",
        "ml_decoder_small",
        "ml_decoder_zsl_small",
        "query2label",
        "mldecoder",
        "nope",
        "os",
        "patches",
    ),
]
# A bytes argument that is not UTF-8 comes with such letters; NUL cannot be in an argument.
_ARGUMENT = st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(
    "\udc80\udcff"
)
# What asks for days of work or for the network is no fault of a program that does it.
SLOW = ("train.compile", "data.val_images", "data.max_digits", "hydra")


def values() -> SearchStrategy[str]:
    """Return the right side of a setting."""
    numbers, fragments = st.sampled_from(NUMBERS).map(str), st.sampled_from(FRAGMENTS)
    return weighted((5, numbers), (5, fragments), (1, st.text(_ARGUMENT, max_size=12)))


def keys(known: Sequence[str]) -> SearchStrategy[str]:
    """Return known keys, most of the time, some that look like one, and others."""
    real = st.sampled_from([key for key in known if not key.startswith(SLOW)])

    def near(key: str, place: int, change: str) -> str:
        place %= len(key)
        return key[:place] + change + key[place + 1 :]

    almost = st.builds(
        near, real, st.integers(0, 40), st.sampled_from(["", ".", "X", "=", "@", "[0]", "\x1b"])
    )
    return weighted((10, real), (1, almost), (1, st.text(_ARGUMENT, max_size=8)))


def settings_words(known: Sequence[str]) -> SearchStrategy[list[str]]:
    """Return settings of a command line, mostly one: the first one that is wrong ends it."""
    signs = st.sampled_from(["", "", "", "", "", "", "", "+", "++", "~"])
    pairs = st.builds(lambda sign, key, value: f"{sign}{key}={value}", signs, keys(known), values())
    return few(weighted((12, pairs), (1, values())).filter(_harmless))


def _harmless(word: str) -> bool:
    """Tell whether a word asks for neither other work nor input, as `-h` and `-m` do."""
    return not word.startswith("-") and not word.lstrip("+~").startswith(SLOW)


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """One change of bytes: `length` bytes at `place`, if negative from the end, become `new`."""

    place: int
    length: int
    new: bytes

    def __call__(self, content: bytes) -> bytes:
        """Return the changed content."""
        place = self.place % (len(content) + 1)
        return content[:place] + self.new + content[place + self.length :]


# What means something to a reader of text, or to a terminal.
TOKENS = [
    *(
        b'"',
        b"'",
        b",",
        b";",
        b":",
        b"\n",
        b"\r",
        b"\t",
        b" ",
        b"\\",
        b"\\u0000",
        b"\\ud800",
        b"{",
        b"}",
        b"[",
        b"]",
        b"<",
        b">",
    ),
    *(
        b"</",
        b"&amp;",
        b"&x;",
        b"<!DOCTYPE x>",
        b"<?xml version='1.0' encoding='utf-16'?>",
        b"null",
        b"NaN",
        b"true",
        b"0",
    ),
    *(
        b"-1",
        b"1e999",
        b"9" * 5000,
        b"..",
        b"/",
        b"\x00",
        b"\x1b[31m",
        b"\x7f",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
        b"\xff",
    ),
]


def edits(size: int, *, text: bool = False) -> SearchStrategy[list[Edit]]:
    """Return changes of a file: flips, insertions and cuts, with more of them at both ends.

    Args:
        size: of the file.
        text: new bytes are mostly such as mean something in a text.
    """
    if text:
        places, new = st.integers(0, size), st.sampled_from(TOKENS)
        token = st.builds(Edit, places, st.integers(0, 2), new)
        cuts = st.builds(Edit, places, st.just(size) | st.integers(1, 30), st.just(b""))
        return few(
            weighted(
                (4, token),
                (1, cuts),
                (1, st.builds(Edit, places, st.just(1), st.binary(max_size=2))),
            )
        )
    places = (
        st.integers(0, min(size, 500))
        | st.integers(-min(size, 1500) - 1, -1)
        | st.integers(0, size)
    )
    flips = st.builds(Edit, places, st.just(1), st.binary(min_size=1, max_size=1))
    insertions = st.builds(Edit, places, st.integers(0, 8), st.binary(max_size=8))
    cuts = st.builds(Edit, places, st.just(size) | st.integers(0, 1000), st.just(b""))
    return few(weighted((2, flips), (1, insertions), (1, cuts)))


def edited(content: bytes, changes: Sequence[Edit]) -> bytes:
    """Return the content after some changes."""
    for change in changes:
        content = change(content)
    return content


def edited_member(archive: bytes, ending: str, changes: Sequence[Edit]) -> bytes:
    """Return a zip archive, whole and stored, in which one member was changed."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.namelist():
            content = old.read(member)
            new.writestr(member, edited(content, changes) if member.endswith(ending) else content)
    return changed.getvalue()


# --- trees of values: checkpoints and JSON --------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One change of a tree at a path: of `TREE_CHANGES`, or of `TENSOR_CHANGES` for a tensor."""

    path: Path
    what: str
    value: Any = None


TENSORS: dict[str, Callable[[], Any]] = {
    "tensor of no dimension": lambda: torch.tensor(1.0),
    "tensor of three zeros": lambda: torch.zeros(3),
    "tensor of no element": lambda: torch.zeros(0),
    "tensor of int8": lambda: torch.ones(2, 2, dtype=torch.int8),
    "set": lambda: {1},
}
TENSOR_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "float64": lambda t: t.double(),
    "float16": lambda t: t.half(),
    "int8": lambda t: t.to(torch.int8),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "flat": lambda t: t.reshape(-1),
    "transposed": lambda t: t.reshape(len(t) if t.ndim else 1, -1).t(),
    "one more dimension": lambda t: t[None],
    "first only": lambda t: t[:1] if t.ndim else t,
    "none": lambda t: t[:0] if t.ndim else t,
    "nan": lambda t: torch.full_like(t, float("nan")),
    "inf": lambda t: torch.full_like(t, float("inf")),
    "huge": lambda t: torch.full_like(t, 3e38),
    "negative": lambda t: -t,
    "zero": lambda t: torch.zeros_like(t),
    "sparse": lambda t: t.to_sparse(),
    "meta": lambda t: t.to("meta"),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "expanded": lambda t: torch.zeros(1).expand(10**9),
    "strided": lambda t: torch.zeros(4 * max(1, t.numel()))[::4][: t.numel()].reshape(t.shape),
}
TREE_CHANGES = (
    "replace",
    "delete",
    "rename",
    "add",
    "repeat",
    "swap with the next",
    "wrap in a list",
)


def paths(tree: Any, path: Path = ()) -> list[Path]:
    """Return the paths to all values of a tree but the tree itself."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        return []
    found = []
    for key, value in items:
        found += [(*path, key), *paths(value, (*path, key))]
    return found


def changes(
    tree: Any, odd: SearchStrategy[Any], extra: Sequence[str] = ()
) -> SearchStrategy[list[Change]]:
    """Return one to three changes of a tree, each of its branches as likely as another.

    Args:
        tree: dictionaries and lists.
        odd: what values are replaced by.
        extra: names of keys that may be added.
    """
    branches: dict[Any, list[Path]] = {}
    for path in paths(tree):
        branches.setdefault(path[0], []).append(path)

    def change(path: Path, what: str, value: Any, name: str) -> Change:
        if what in ("rename", "add"):
            return Change(path, what, (name, value))
        return Change(path, what, value if what == "replace" else None)

    def at(path: Path) -> SearchStrategy[Change]:
        what = st.sampled_from(["replace", "replace", "replace", *TREE_CHANGES])
        common = st.builds(
            change, st.just(path), what, odd, st.sampled_from([*extra, "", "x", "\x1b[31m"])
        )
        if not isinstance(at_path(tree, path), Tensor):
            return common
        return common | st.builds(Change, st.just(path), st.sampled_from(list(TENSOR_CHANGES)))

    # Hypothesis likes the first of several things: let it be the largest.
    largest_first = sorted(branches, key=lambda branch: -len(branches[branch]))
    places = st.sampled_from(largest_first).flatmap(
        lambda branch: st.sampled_from(branches[branch])
    )
    return few(places.flatmap(at))


def at_path(tree: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def changed(tree: Any, list_of_changes: Sequence[Change]) -> Any:
    """Return a copy of a tree after some changes; one whose path is gone by then does nothing."""
    tree = _copy(tree)
    for change in list_of_changes:
        try:
            parent = at_path(tree, change.path[:-1])
            value = parent[change.path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        if not isinstance(parent, dict | list):  # a text, of which the path names a letter
            continue
        _apply(parent, change.path[-1], value, change)
    return tree


def _apply(parent: Any, key: Any, value: Any, change: Change) -> None:
    if change.what in TENSOR_CHANGES:
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
            parent[key] = TENSOR_CHANGES[change.what](value)
    elif change.what == "replace":
        parent[key] = (
            TENSORS[change.value]() if change.value in list(TENSORS) else _copy(change.value)
        )
    elif change.what == "delete":
        del parent[key]
    elif change.what == "wrap in a list":
        parent[key] = [value]
    elif isinstance(parent, list):
        if change.what == "repeat":
            parent.insert(key, _copy(value))
        elif change.what == "swap with the next":
            parent[key], parent[key - 1] = parent[key - 1], parent[key]
        else:
            parent.append(_copy(change.value[1]) if change.value else value)
    elif change.what == "rename":
        parent[change.value[0]] = parent.pop(key)
    elif change.what == "add":
        parent[change.value[0]] = _copy(change.value[1])
    elif change.what == "swap with the next":
        other = list(parent)[list(parent).index(key) - 1]
        parent[key], parent[other] = parent[other], parent[key]


def _copy(value: Any) -> Any:
    """Copy containers, not the tensors in them."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def json_values() -> SearchStrategy[Any]:
    """Return values of JSON that Python's reader takes, with NaN and numbers beyond any range."""
    plain = (
        st.none()
        | st.booleans()
        | st.sampled_from([*NUMBERS, 10**400])
        | names()
        | st.just("\ud800")
    )
    return (
        plain
        | st.lists(plain, max_size=2)
        | st.dictionaries(st.sampled_from(["id", "name", "x"]), plain, max_size=2)
    )


def checkpoint_values() -> SearchStrategy[Any]:
    """Return what a file of weights can hold."""
    special = [*TENSORS, (), (1, 2), b"x", 1j, {1: 2}, {None: "x"}]
    return weighted((2, json_values()), (1, st.sampled_from(special)))


# --- tables of text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One change of a text table: the cell of a row (0: the header) and column; or several."""

    row: int
    column: int
    what: str
    text: str = ""


CELL_CHANGES = (
    "text",
    "text",
    "text",
    "text",
    "drop row",
    "repeat row",
    "drop column",
    "repeat column",
    "one more",
)
ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")
ENDS = ("\n", "\n", "\n", "\r\n", "\r")


def cells(rows: int, columns: int) -> SearchStrategy[list[Cell]]:
    """Return one to four changes of a table."""
    one = st.builds(
        Cell,
        st.integers(0, rows - 1),
        st.integers(0, columns - 1),
        st.sampled_from(CELL_CHANGES),
        names(),
    )
    return few(one)


def changed_table(
    table: Sequence[Sequence[str]], list_of_changes: Sequence[Cell]
) -> list[list[str]]:
    """Return a copy of a table after some changes."""
    rows = [list(row) for row in table]
    for change in list_of_changes:
        if change.row >= len(rows) or change.column >= len(rows[change.row]):
            continue
        if change.what == "text":
            rows[change.row][change.column] = change.text
        elif change.what == "drop row":
            del rows[change.row]
        elif change.what == "repeat row":
            rows.insert(change.row, list(rows[change.row]))
        elif change.what == "one more":
            rows[change.row].append(change.text)
        else:
            for row in rows:
                part = row[change.column : change.column + 1]
                row[change.column : change.column + 1] = (
                    part * 2 if change.what == "repeat column" else []
                )
    return rows


def as_csv(rows: Sequence[Sequence[str]], *, end: str, encoding: str) -> bytes:
    """Return the bytes of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue().encode(encoding, errors="replace")


# --- arrays ---------------------------------------------------------------------------------------

ARRAY_CHANGES: dict[str, Callable[[np.ndarray], Any]] = {
    "none of it": lambda a: a[:0] if a.ndim else a,
    "one less": lambda a: a[:-1] if a.ndim else a,
    "twice": lambda a: np.concatenate([a, a]) if a.ndim else a,
    "backwards": lambda a: a[::-1] if a.ndim else a,
    "one more dimension": lambda a: a[None],
    "without dimension": lambda a: a.reshape(-1)[0] if a.size else a,
    "float": lambda a: a.astype(np.float64) if a.dtype.kind in "iu" else a,
    "bool": lambda a: a.astype(bool) if a.dtype.kind in "iu" else a,
    "complex": lambda a: a.astype(np.complex64) if a.dtype.kind in "iu" else a,
    "text": lambda a: a.astype(np.str_) if a.dtype.kind in "iu" else a,
    "bytes": lambda a: a.astype(np.bytes_) if a.dtype.kind in "iu" else a,
    "objects": lambda a: a.astype(object),
    "zero": lambda a: np.zeros_like(a),
    "one more than it is": lambda a: a + 1 if a.dtype.kind in "iu" else a,
    "negative": lambda a: -a - 1 if a.dtype.kind in "iu" else a,
    "huge": lambda a: np.full_like(a, 10**9, dtype=np.int64) if a.dtype.kind in "iu" else a,
    "absolute path": lambda a: (
        np.full_like(a, b"/etc/passwd", dtype="S20") if a.dtype.kind == "S" else a
    ),
    "path to above": lambda a: (
        np.full_like(a, b"../../x.png", dtype="S20") if a.dtype.kind == "S" else a
    ),
    "not UTF-8": lambda a: np.full_like(a, b"\xff\xfe", dtype="S20") if a.dtype.kind == "S" else a,
    "other name": lambda a: (
        np.array([*a[:-1].tolist(), "\x1b[31m"]) if a.dtype.kind == "U" and a.ndim else a
    ),
    "structured": lambda a: np.zeros(a.shape, [("x", "i4")]),
}


def array_changes(known: Sequence[str]) -> SearchStrategy[list[tuple[str, str]]]:
    """Return changes of a file of arrays, as pairs of an array's name and what is done to it."""
    return few(st.tuples(st.sampled_from(known), st.sampled_from([*ARRAY_CHANGES, "delete"])))


def changed_arrays(archive: bytes, list_of_changes: Sequence[tuple[str, str]]) -> bytes:
    """Return an .npz file in which arrays were changed."""
    with np.load(io.BytesIO(archive), allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, what in list_of_changes:
        if name in arrays and what == "delete":
            del arrays[name]
        elif name in arrays:
            arrays[name] = np.asarray(ARRAY_CHANGES[what](arrays[name]))
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()
