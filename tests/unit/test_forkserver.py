"""The tests fork their commands: a new interpreter would take ten times as long
(tests/forkserver.py).
"""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.forkserver import Forks
from tests.support import FEEDMILL, _environment


@pytest.mark.parametrize(
    "library",
    [
        "accelerate",
        "onnxruntime",
        "pandas",
        "polars",
        "pyarrow",
        "sklearn",
        "transformers",
    ],
)
def test_commands_are_forked_although_an_imported_library_sets_variables(
    tmp_path: Path, library: str
) -> None:
    import_module(library)
    assert Forks.take([FEEDMILL, "status"], _environment(tmp_path, COLUMNS="200"))
    assert Forks.take([sys.executable, "-m", "feedmill"], _environment(tmp_path))
    assert not Forks.take(
        [FEEDMILL, "status"], _environment(tmp_path, NEW_INTERPRETER="1")
    )
