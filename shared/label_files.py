"""Read labels from a file: JSON, CSV with a label and its descriptions per row, or text with a label per line."""

import csv
import json
import re
from pathlib import Path

from feedmill.shared.errors import json_problem, printable

#: Maximum bytes of a file: 256 labels with all their descriptions take less.
MAX_BYTES = 2**20
#: Values that name a file: @ and a path, or a single name with one of these endings.
FILE_NAME = re.compile(r"@.+|[^,\n\[{]+\.(json|csv|txt)", re.IGNORECASE | re.DOTALL)
#: Names of a first column, by which a CSV file's header is recognized.
HEADERS = frozenset({"label", "labels", "name"})


def names_file(value: str) -> bool:
    """Return true if the value of an option names a file of labels instead of the labels."""
    return FILE_NAME.fullmatch(value.strip()) is not None


def read(value: str) -> object:
    """Return the labels in the file that the value names: names, or an object of descriptions.

    Raises ValueError if the file cannot be read.
    """
    path = Path(value.strip().removeprefix("@"))
    name = printable(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(
            f"there is no file {name} with labels; values after @, or ending in .json, .csv or .txt, name a file"
        ) from None
    except (OSError, ValueError) as error:  # a path may contain a null character; the text may not be UTF-8
        raise ValueError(f"the file {name} cannot be read ({error})") from None
    if not text.strip():
        raise ValueError(f"the file {name} is empty")
    if path.suffix.lower() == ".csv":
        return _csv(text)
    if path.suffix.lower() == ".json" or text.lstrip()[0] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the file {name} is not JSON: {json_problem(error)}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _csv(text: str) -> object:
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=max(",;\t", key=lines[0].count))]
    if rows[0][0].lower() in HEADERS:
        del rows[0]
    names = [row[0] for row in rows]
    if len(set(names)) < len(names) or not any(any(row[1:]) for row in rows):
        return names
    return {row[0]: [cell for cell in row[1:] if cell] or [row[0]] for row in rows}
