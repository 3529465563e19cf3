"""The fields of a form that say how posts are classified."""

from collections.abc import Mapping

from feedmill.api.request import read_options
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.none_of_these import NONE_WORDS
from feedmill.web.pages.frame import field_of


def options_of(form: Mapping[str, list[str]]) -> ClassifyOptions:
    """Return the options that a form asks for. Raises UserError."""
    none = field_of(form, "none").strip()
    threshold: float | bool | None = None
    if none in NONE_WORDS:
        threshold = NONE_WORDS[none]
    elif none:
        try:
            threshold = float(none)
        except ValueError:
            raise UserError(
                f"None of these: {printable(none)!r:.40} is neither on, off nor a score."
            ) from None
    return read_options(
        _labels_of(field_of(form, "labels")),
        field_of(form, "template").strip() or None,
        "multi_label" in form,
        threshold,
    )


def _labels_of(text: str) -> dict[str, str] | list[str] | None:
    """Return the labels of a form, one on each line, with a description after a colon.

    None if there are none. Raises UserError.
    """
    descriptions: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, description = map(str.strip, line.partition(":"))
        if not name and not colon:
            continue
        if name in descriptions:
            raise UserError(f"The label {printable(name)!r:.80} is named twice.")
        descriptions[name] = description or name
    return descriptions or None
