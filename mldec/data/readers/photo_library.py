"""A photo library with the keywords of a photo manager."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal
from unicodedata import combining, normalize

import numpy as np

from mldec.data.cache import cached_per_file, stamp
from mldec.data.keywords import GROUPS, paths_of, read_keywords, sidecars
from mldec.data.labels import from_entries
from mldec.data.photos import SkippedFiles, files_below
from mldec.data.similar import burst_pairs, perceptual_hashes, similar_groups
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT, HoldOut, log_split
from mldec.data.table import Table, encode_paths
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log
from mldec.files.text import expand_user
from mldec.files.xmp import Keyword
from mldec.names import check_names, format_list, given_names, indices_of
from mldec.runtime import distributed
from mldec.words.vectors import read_class_list

MAX_NAMES = 30  # names in a message
MAX_PAIRS = 20  # pairs of similar words in a message


def keywords(
    *,
    root: str,
    levels: Literal["leaves", "paths", "all"] = "leaves",
    min_photos: int = 10,
    exclude: str | list[str] | None = None,
    people: bool = False,
    untagged: bool = False,
    missing: Literal["negative", "unknown"] = "negative",
    synonyms: str | None = None,
    similar: Literal["together", "ignore"] = "together",
    burst_seconds: float = 2.0,
    division: HoldOut = HELD_OUT,
    threshold: float = 0.5,
    skip_empty: bool = True,
    top_k: int | None = None,
) -> Source:
    """Return the photos of a folder and its subfolders with their keywords, sorted by path.

    `read_keywords` describes which keywords are read. The folder is not changed. Results are
    cached per photo, so that a second run reads new and changed photos only.

    Args:
        levels: Classes of a hierarchy such as Places/Paris. "leaves": Paris. "paths":
            Places/Paris. "all": Places and Paris. A photo with Places/Paris is a positive of
            Places, too, if Places is a class. Names are equal ignoring case.
        min_photos: Minimum number of photos of a class.
        exclude: Keywords to ignore with all keywords below them, such as [Places], or a text file
            with one keyword per line.
        people: Whether the names of people and albums are classes.
        untagged: Whether to use photos without keywords, as negatives of every class.
        missing: Meaning of an absent keyword of a tagged training photo. "unknown" (-1, not
            annotated) needs a loss such as `partial` or `em`. Validation labels are negative.
        synonyms: Text file with a class per line: its name, and other keywords that mean the same,
            separated by semicolons.
        similar: "together": Near-duplicates, such as bursts and edited copies, are in the same
            split. "ignore": Photos are not compared.
        burst_seconds: Consecutive photos of a camera model with at most this time between them
            are near-duplicates, too, by the capture time in their EXIF data. 0 turns this off.
        division: Held-out photos.
        top_k: k of precision, recall and F1 at top-k.
    """
    if min_photos < 1:
        raise ValueError(f"min_photos is {min_photos}; it must be at least 1")
    evaluator = multi_label(threshold, top_k=top_k, skip_empty=skip_empty)
    folder = check_folder(root, "the photos")
    excluded = given_names(exclude, folder) or ()
    class_list = None if synonyms is None else folder / expand_user(synonyms)

    def read_all(cache_dir: str | None) -> Table:
        photos = read_library(folder, cache_dir)
        tagged = choose_keywords(photos, excluded, people=people)
        if not untagged:
            tagged = {file: keywords for file, keywords in tagged.items() if keywords}
        log.info(f"keywords: {len(tagged):,} of {len(photos):,} photos in {folder} are used")

        same = read_class_list(class_list) if class_list else ()
        table = _label(tagged, levels, same, min_photos, folder)
        if similar == "together":
            bursts = burst_pairs([photos[file]["taken"] for file in tagged], burst_seconds)
            hashes = perceptual_hashes(in_folder(table, folder), cache_dir)
            groups = similar_groups(hashes, table.files, bursts)
            table = replace(table, groups=groups)
            sizes = np.unique(groups, return_counts=True)[1]
            log.info(
                f"keywords: {sizes[sizes > 1].sum():,} photos are in {(sizes > 1).sum():,} groups "
                f"of near-duplicates and bursts (data.burst_seconds), each in one split; the "
                f"largest has {sizes.max():,}"
            )
        return table

    @cache
    def load_all(cache_dir: str | None) -> Table:
        # Rank 0 reads the library, and sends the result to the other ranks.
        return distributed.on_main(lambda: read_all(cache_dir))

    def load(part: str, cache_dir: str | None) -> StoredImages:
        images = division.select(in_folder(load_all(cache_dir), folder), val=part == "val")
        return log_split("keywords", part, images)

    def load_train(part: str, cache_dir: str | None) -> StoredImages:
        images = load(part, cache_dir)
        default = 0 if missing == "negative" else -1
        return replace(images, labels=replace(images.labels, default=default))

    return Source(load=load, load_train=load_train, where=folder, evaluator=evaluator)


def read_library(folder: Path, cache_dir: str | None) -> dict[str, dict[str, Any]]:
    """Return `PhotoKeywords` as a dictionary for each photo in a folder, by relative path.

    Photos with damaged metadata are left out. They, sidecars without a photo and unsupported files
    are counted in warnings.
    """
    skipped = SkippedFiles()
    by_folder: defaultdict[Path, set[str]] = defaultdict(set)
    for file in map(Path, files_below(folder, skipped)):
        by_folder[file.parent].add(file.name)

    stamps = {}
    orphans = []
    for parent, names in by_folder.items():
        # A sidecar belongs to all files with its name, also to videos and raw files.
        others = {name for name in names if not name.lower().endswith(".xmp")}
        owners = others | {Path(name).stem for name in others}
        orphans += [str(parent / name) for name in sorted(names) if Path(name).stem not in owners]
        for name in sorted(others):
            path = parent / name
            if skipped.accepts(str(path)):
                found = [sidecar for sidecar in sidecars(path) if sidecar.name in names]
                stamps[str(path.relative_to(folder))] = " ".join(map(stamp, [path, *found]))

    def compute(file: str) -> dict[str, Any]:
        try:
            return vars(read_keywords(folder / file))
        except DataError as error:
            return {"error": str(error)}

    values = cached_per_file("keywords 5", folder, stamps, compute, cache_dir)
    errors = [value["error"] for value in values.values() if "error" in value]
    if errors:
        log.warning(f"keywords: {len(errors):,} photos are left out; the first: {errors[0]}")
    if orphans:
        log.warning(f"keywords: {len(orphans):,} sidecars have no photo, such as {orphans[0]}")
    skipped.log("keywords")
    if not values:
        raise DataError(f"data.root: {folder} has no photos; set it to the folder of the photos")
    return {file: values[file] for file in sorted(values) if "error" not in values[file]}


def choose_keywords(
    photos: Mapping[str, Mapping[str, Any]], excluded: Sequence[str], *, people: bool
) -> dict[str, list[Keyword]]:
    """Return the keywords of each photo without the excluded ones, and without people.

    A person of one photo is a person in all photos, also in those without a face region, ignoring
    case. Names of albums, and in groups such as Family, do not hide keywords of other parents.
    """
    hidden = {tuple(keyword) for photo in photos.values() for keyword in photo["people"]}
    persons = {keyword[-1].casefold() for keyword in hidden if keyword[0].casefold() not in GROUPS}
    internal = {"/".join(keyword) for photo in photos.values() for keyword in photo["internal"]}
    repaired = {name for photo in photos.values() for name in photo["repaired"]}

    _log_names(repaired, "keywords whose UTF-8 was encoded twice are repaired")
    _log_names(internal, "tags that programs write for themselves are ignored")
    if not people:
        names_of_people = {keyword[-1] for keyword in hidden}
        _log_names(names_of_people, "names of people and albums are ignored (data.people)")
    ignored = {name.casefold() for name in excluded}
    found = set()

    # A program that writes all keywords to one item, such as "dog, beach", does so in all photos.
    # Otherwise a comma is a part of a name, such as "Paris, France".
    contents = [photo["content"] for photo in photos.values()]
    lists = {name for content in contents for name, *inner in content if "," in name and not inner}
    if any(len(photo["listed"]) + len(photo["internal"]) > 1 for photo in photos.values()):
        lists.clear()
    _log_names(lists, "keywords with commas are read as lists, because no photo has two keywords")

    chosen = {}
    for file, photo in photos.items():
        keywords = list(photo["content"])
        if keywords and keywords[0][0] in lists:
            names_in_list = map(str.strip, keywords[0][0].split(","))
            keywords = [(name,) for name in names_in_list if name]
        if people:
            keywords += photo["people"]
        kept = []
        for keyword in keywords:
            names = {name.casefold() for name in [*keyword, *paths_of(keyword)]}
            found |= names & ignored
            is_person = keyword[-1].casefold() in persons and not people
            if not is_person and names.isdisjoint(ignored):
                kept.append(tuple(keyword))
        chosen[file] = kept

    tops = {keyword[0] for keywords in chosen.values() for keyword in keywords if len(keyword) > 1}
    _log_names(tops, "top-level keywords have others below them (data.exclude ignores both)")
    unknown = [name for name in excluded if name.casefold() not in found]
    if unknown:
        log.warning(f"data.exclude: no photo has the keywords {format_list(unknown)}")
    return chosen


def _log_names(names: Collection[str], event: str) -> None:
    if names:
        log.info(f"keywords: {len(names):,} {event}: {format_list(sorted(names), MAX_NAMES)}")


def looks_like_person(name: str) -> bool:
    """Return True for two capitalized words, such as "Anna Smith" (and "New York")."""
    words = name.rpartition("/")[2].split()
    return len(words) == 2 and all(word[0].isupper() and not word.isupper() for word in words)


def _label(
    photos: Mapping[str, Sequence[Keyword]],
    levels: str,
    synonyms: Sequence[Sequence[str]],
    least: int,
    where: Path,
) -> Table:
    """Return the photos with the classes of at least `least` photos, sorted by name.

    Names that differ only in case are one class. For `levels` see `keywords`. `synonyms` are groups
    of names of the class of the first name.
    """
    class_of: dict[str, str] = {}  # by lowercase name
    for group in synonyms:
        class_of.update((name.casefold(), group[0]) for name in group)
    counts: Counter[str] = Counter()  # photos per lowercase name
    spellings: defaultdict[str, Counter[str]] = defaultdict(Counter)
    positives = []
    for keywords in photos.values():
        names: set[str] = set()
        for keyword in keywords:
            path = paths_of(keyword) if levels == "paths" else keyword
            of_keyword = [class_of.get(name.casefold(), name) for name in path]
            names.update(name.casefold() for name in of_keyword)
            # A parent is only a class if some photo has it as a keyword, or with levels="all".
            for name in of_keyword if levels == "all" else of_keyword[-1:]:
                spellings[name.casefold()][name] += 1
        counts.update(names)
        positives.append(names)

    # A class has its most frequent spelling as its name.
    by_name = {}
    for key, forms in spellings.items():
        name, _ = min(forms.items(), key=lambda form: (-form[1], form[0]))
        by_name[name] = counts[key]
    classes = [name for name in sorted(by_name) if by_name[name] >= least]
    _log_classes(by_name, classes, least)
    if not classes:
        most = max(by_name.values(), default=0)
        fault = f"no keyword has {least} photos; the most frequent one has {most}"
        raise DataError(f"{where}: {fault}; tag more photos, or lower data.min_photos")

    columns = indices_of(name.casefold() for name in classes)
    entries = [{columns[name]: 1 for name in sorted(names & columns.keys())} for names in positives]
    labels = from_entries(entries, num_classes=len(classes))
    return Table(encode_paths(list(photos)), labels, check_names(classes, where))


def _log_classes(counts: Mapping[str, int], classes: Sequence[str], least: int) -> None:
    ordered = sorted(classes, key=lambda name: -counts[name])
    frequent = format_list([f"{name} ({counts[name]:,})" for name in ordered], MAX_NAMES)
    log.info(
        f"keywords: {len(classes):,} of {len(counts):,} keywords have at least {least} photos "
        f"(data.min_photos): {frequent}"
    )
    # No list marks these names as people, so only the user can decide.
    people = [name for name in ordered if looks_like_person(name)]
    _log_names(people, "classes may be names of people; data.exclude ignores them")
    pairs = []
    for rare, common in similar_words(counts):
        pairs.append(f"{rare} ({counts[rare]:,}) and {common} ({counts[common]:,})")
    if pairs:
        log.info(
            f"keywords: {len(pairs):,} pairs may be the same word; join them with data.synonyms: "
            f"{format_list(pairs, MAX_PAIRS)}"
        )


def similar_words(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return pairs of a rarer and a more frequent name that look like the same word.

    They differ in case, accents, spaces, punctuation or a regular plural. Names with at least five
    letters may also differ in one letter or two swapped letters, if one is five times as frequent.
    `counts` maps a name to its number of photos.
    """
    buckets: defaultdict[str, set[str]] = defaultdict(set)
    for name in counts:
        letters = [letter for letter in normalize("NFKD", name.casefold()) if not combining(letter)]
        word = "".join(filter(str.isalnum, letters)) or name
        # The same letters for singular and plural: box(es), dog(s), hors(es), citi(es).
        singular = word
        if len(word) > 3:
            singular = re.sub("(?<=[sxzh])es$|(?<=[^su])s$", "", word)
            singular = re.sub("y$", "i", singular.removesuffix("e"))
        buckets[f"{singular}$"].add(name)

        # Words that differ in one letter are equal without it.
        if len(word) >= 5 and word.isalpha():
            buckets[word].add(name)
            for place in range(len(word)):
                buckets[word[:place] + word[place + 1 :]].add(name)

    pairs = set()
    for key, names in buckets.items():
        for pair in combinations(sorted(names), 2):
            rare, common = sorted(pair, key=lambda name: (counts[name], name))
            if key.endswith("$") or 5 * counts[rare] <= counts[common]:
                pairs.add((rare, common))
    return sorted(pairs, key=lambda pair: (-counts[pair[1]], pair))
