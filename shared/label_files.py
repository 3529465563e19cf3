"""Read labels from a file or from JSON, in the shapes that people and programs write them.

A shape that can be meant in two ways is refused: labels named "0" or "labels" would be stored with
every post.
"""

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

from feedmill.shared.errors import json_problem, printable

#: Maximum bytes of a file of labels: 256 labels with all their descriptions take less.
MAX_BYTES = 2**20
#: Names of a column, or of a key of an object, with a label's name; with its descriptions; and
#: with its number.
NAME_KEYS = ("label", "labels", "name")
DESCRIPTION_KEYS = ("description", "descriptions")
NUMBER_KEYS = ("id", "index", "number", "")
#: Keys of an object that holds the labels, in any case.
WRAPPERS = ("labels", "candidate_labels", "classes")
#: Other keys that name labels, not a label, if they are the only one.
ONLY_KEYS = (
    "label", "name", "names", "class", "class_names", "category", "categories", "topic",
    "topics", "tags", "data",
    "id2label", "label2id",
)  # fmt: skip
#: A cell with a number: of the label, or for instance how many posts have it.
NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?%?")
#: The first line of a file for Excel, which names the delimiter.
DELIMITER_LINE = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)
#: The accepted shapes, for errors.
SHAPES = (
    'write a list such as ["sports", "food"], or an object with a description or several for each '
    "label, such as "
    '{"sports": "matches and athletes", "food": ["cooking", "restaurants"]}'
)


def read_labels(path: Path) -> object:
    """Return the labels in a file: names, or an object of descriptions.

    It is JSON, CSV with a label and its descriptions per row, or text with a label per line.
    Raises ValueError if the file cannot be read, or has another shape.
    """
    name = printable(str(path))
    try:
        text = _read_text(path)
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(
            f"there is no file {name} with labels; values after @, or ending in .json, .csv or "
            ".txt, name a file"
        ) from None
    except (OSError, ValueError) as error:
        # a path may contain a null character; the text may not be UTF-8
        raise ValueError(
            f"the file {name} cannot be read ({error}); save it as UTF-8"
        ) from None
    content = text.strip()
    if not content:
        raise ValueError(f"the file {name} is empty")
    suffix = path.suffix.lower()
    try:
        if suffix in (".csv", ".tsv"):
            return labels_of_csv(text)
        if suffix == ".json" or content[0] in "[{":
            return labels_of_json(text)
    except ValueError as error:
        raise ValueError(f"the file {name}: {error}") from None
    lines = map(str.strip, text.splitlines())
    names = [line for line in lines if line]
    if len(names) == 1:
        return names[0]  # a single line is split on commas
    return names


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises OSError, and ValueError if it is too long or no text."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes")
    return decoded(data)


#: Byte order marks of UTF-16.
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decoded(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark. Raises ValueError."""
    encoding = "utf-8-sig"
    if data.startswith(UTF16_MARKS):
        encoding = "utf-16"
    text = data.decode(encoding)
    if "\0" in text:
        raise ValueError(
            "it contains null characters, as UTF-16 without a byte order mark and UTF-32 do"
        )
    return text


def labels_of_json(text: str) -> object:
    """Return the labels in JSON. Raises ValueError if it is not JSON, or has another shape."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError(f"is not JSON: {json_problem(error)}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {json_problem(error)}") from None
    return _labels_of(value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{printable(name)!r:.80} is named twice")
    return dict(pairs)


def _labels_of(value: object) -> object:
    """Return the labels that a value of JSON names."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, dict) for item in value):
            return _of_objects(value)
        return [_name_of(item) for item in value]
    if isinstance(value, dict) and value:
        return _of_object(value)
    raise ValueError(f"names no labels; {SHAPES}")


def _of_object(value: dict[str, Any]) -> object:
    # Of a model's configuration, beside many other keys.
    for key in ("id2label", "label2id"):
        numbering = value.get(key)
        if isinstance(numbering, dict):
            return _labels_of(numbering)
    count = len(value)
    for key, part in value.items():
        is_wrapper = key.lower() in WRAPPERS
        if is_wrapper and isinstance(part, list | dict):
            if count == 1:
                return _labels_of(part)
            raise ValueError(f"has {printable(key)!r:.80} beside other keys; {SHAPES}")
    if count == 1:
        ((only_key, only_value),) = value.items()
        name = only_key.lower()
        if name in WRAPPERS:
            return _labels_of(only_value)
        if name in ONLY_KEYS and isinstance(only_value, list):
            raise ValueError(
                f"has only the key {printable(only_key)!r:.80}, which is no label; {SHAPES}"
            )
    if all(starmap(_is_numbered_name, value.items())):
        names = {int(key): name for key, name in value.items()}
        return _by_number(names, count)
    if all(map(_is_number, value.values())):
        names = {number: name for name, number in value.items()}
        return _by_number(names, count)
    descriptions = {}
    for name, description in value.items():
        descriptions[name] = _descriptions_of(name, description)
    return descriptions


def _is_numbered_name(key: str, name: object) -> bool:
    """Return whether an entry of an object is a number and a label's name."""
    if not isinstance(name, str):
        return False
    number = key.strip()
    return number.isdecimal()


def _by_number(names: Mapping[int, str], count: int) -> list[str]:
    """Return the labels in the order of their numbers, which are 0, 1, 2 and so on.

    count: number of labels, of which two may have one number.
    """
    numbers = sorted(names)
    if numbers != list(range(count)):
        raise ValueError(
            "has numbers for labels, but not 0, 1, 2 and so on; if the numbers are the labels' "
            "names, put each "
            f'description into a list, such as {{"1": ["terrible"], "5": ["excellent"]}}; '
            f"otherwise {SHAPES}"
        )
    return [names[number] for number in numbers]


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int)


def _name_of(item: object) -> str:
    """Return a label's name: a text, or a number or true and false as JSON writes them."""
    if isinstance(item, str):
        return item
    quoted = json.dumps(item)
    if isinstance(item, bool | int):
        return quoted
    raise ValueError(f"a label is {quoted:.80}, not text; {SHAPES}")


def _descriptions_of(name: str, value: object) -> object:
    """Return a label's description or descriptions: the name itself if it has none."""
    if value is None or value in ("", []):
        return name
    if isinstance(value, dict):
        keys = [key for key in value if key in DESCRIPTION_KEYS]
        others = set(value).difference(DESCRIPTION_KEYS, NUMBER_KEYS)
        if len(keys) == 1 and not others:
            (key,) = keys
            return _descriptions_of(name, value[key])
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    quoted = json.dumps(value)
    raise ValueError(
        f"the label {name!r:.80} has {quoted:.80} in place of its description; {SHAPES}"
    )


def _of_objects(items: list[dict[str, Any]]) -> object:
    """Return the labels of a list of objects, each with a name and perhaps descriptions and a
    number.
    """
    labels: dict[str, object] = {}
    for item in items:
        name_keys = [key for key in NAME_KEYS if key in item]
        other_keys = set(item).difference(NAME_KEYS, DESCRIPTION_KEYS, NUMBER_KEYS)
        if len(name_keys) != 1 or other_keys:
            keys = ", ".join(item)
            raise ValueError(
                f"an object has the keys {keys:.80}, not label and "
                f"description; {SHAPES}"
            )
        (name_key,) = name_keys
        name = _name_of(item[name_key])
        if name in labels:
            raise ValueError(f"the label {name!r:.80} is named twice")
        description_keys = [key for key in DESCRIPTION_KEYS if key in item]
        description = None
        if description_keys:
            key = description_keys[0]
            description = item[key]
        labels[name] = _descriptions_of(name, description)
    return labels


def labels_of_csv(text: str) -> object:
    """Return the labels in CSV: a label and its descriptions per row. Raises ValueError."""
    rows = _rows_of(text)
    if not rows:
        raise ValueError(f"names no labels; {SHAPES}")
    first_row = rows[0]
    header = [cell.lower() for cell in first_row]
    column_names = {*NAME_KEYS, *DESCRIPTION_KEYS}
    has_header = not column_names.isdisjoint(header)
    if has_header:
        rows = _by_header(header, rows[1:])
    elif len(rows) == 1 and len(first_row) > 1:
        return [cell for cell in first_row if cell]  # a row of labels
    elif all(map(_begins_with_number, rows)):
        numbers = {}
        for number, name, *_ in rows:
            numbers[int(number)] = name
        return _by_number(numbers, len(rows))
    return _by_rows(rows)


def _by_rows(rows: Iterable[list[str]]) -> object:
    """Return the labels of rows with a name and descriptions; only the names if a name repeats or
    all descriptions are numbers.
    """
    names: list[str] = []
    labels: dict[str, list[str]] = {}
    has_texts = False
    for name, *cells in rows:
        descriptions = [cell for cell in cells if cell]
        if not all(map(NUMBER.fullmatch, descriptions)):
            has_texts = True
        names.append(name)
        labels[name] = descriptions or [name]
    has_repeats = len(labels) < len(names)
    if has_repeats or not has_texts:
        return names
    return labels


def _begins_with_number(row: list[str]) -> bool:
    """Return whether a row has a number and a label."""
    if len(row) == 1:
        return False
    number = row[0]
    return number.isdecimal()


def _rows_of(text: str) -> list[list[str]]:
    """Return the rows of CSV that are not blank. Raises ValueError."""
    match = DELIMITER_LINE.match(text)
    if match:
        delimiter = match[1]
        rows_start = match.end()
        text = text[rows_start:]
    else:
        lines = filter(str.strip, text.splitlines())
        first_line = next(lines, "")
        delimiter = max(",;\t", key=first_line.count)
    # With line ends, so that those within quotation marks stay; strict, because a missing mark
    # would join labels.
    file = io.StringIO(text, newline="")
    reader = csv.reader(
        file,
        delimiter=delimiter,
        strict=True,
    )
    rows = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                rows.append(cells)
    except csv.Error as error:
        raise ValueError(f"is not CSV in line {reader.line_num}: {error}") from None
    return rows


def _by_header(header: list[str], rows: Iterable[list[str]]) -> list[list[str]]:
    """Return rows with the label first, without columns of numbers."""
    indexes = []
    others = []
    for index, name in enumerate(header):
        if name in NAME_KEYS:
            indexes.append(index)
        elif name not in (*NUMBER_KEYS, *DESCRIPTION_KEYS):
            others.append(index)
    count = len(indexes)
    if count > 1:
        raise ValueError(
            f"the header names {count} columns of labels; keep the one with the labels"
        )
    # a column of another name, such as topic, before a description
    candidates = [*indexes, *others, 0]
    label_place = candidates[0]
    for name in header[:label_place]:
        if name not in NUMBER_KEYS:
            raise ValueError(
                f"the column {name!r:.80} stands before the column of labels; put "
                "the labels first"
            )
    width = len(header)
    following = range(label_place + 1, width)
    description_places = [
        index for index in following if header[index] not in NUMBER_KEYS
    ]
    ordered = []
    for row in rows:
        row_width = len(row)
        label = ""
        if label_place < row_width:
            label = row[label_place]
        descriptions = [row[index] for index in description_places if index < row_width]
        more_cells = row[width:]
        ordered.append([label, *descriptions, *more_cells])
    return ordered
