"""The error tree in the docstring of shared/errors.py names the classes."""

import re

from shared import errors
from shared.errors import FeedmillError


def test_tree_in_the_docstring_equals_the_classes() -> None:
    classes = [
        name
        for name, found in vars(errors).items()
        if isinstance(found, type) and issubclass(found, FeedmillError) and found is not FeedmillError
    ]
    assert re.findall(r"[├└]─ (\w+)", errors.__doc__ or "") == classes
