"""Titles of posts in terminals and pipes."""

import sys

import pytest
from rich.cells import cell_len

from feedmill.console import with_title
from feedmill.shared.messages import Post

LONG = Post(id="a", title="The keeper saved " * 20)


@pytest.mark.parametrize("title", [LONG.title, "守门员扑出了两个点球" * 20])
def test_a_terminal_gets_titles_cut_to_its_width(
    monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        line = with_title(f"{'a':<12} ", Post(id="a", title=title))
        assert columns - 1 <= cell_len(line) <= columns
        assert line.endswith("…")


def test_a_pipe_gets_whole_titles() -> None:
    assert with_title("a ", LONG) == f"a {' '.join(str(LONG.title).split())}"
