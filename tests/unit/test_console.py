"""feedmill/console.py: tables in terminals, pipes and files."""

import pytest

from feedmill.console import output_console
from feedmill.evaluation.report import models_table

NAME = "a-publisher/" + "a-model-with-a-long-name-" * 5
FOUND = {"accuracy": 0.5, "macro_f1": 0.25, "calibration_error": None, "posts_per_s": 1234.5}


def test_tables_in_pipes_have_whole_cells_and_no_padding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output_console().print(models_table("model", [(NAME, FOUND), ("other", FOUND)]))
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [NAME, "other"]
    assert all(line == line.rstrip() for line in (head, *rows))
    assert head.index("accuracy") > len(NAME)


def test_tables_in_terminals_have_the_terminals_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    console = output_console()
    console.print(models_table("model", [(NAME, FOUND)]))
    assert console.width == 80
    assert NAME not in capsys.readouterr().out
