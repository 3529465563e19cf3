"""The generated parts of the documentation equal the code."""

from feedmill.shared.settings import Settings
from tests.generated import END, FOLDERS, PARTS, ROOT, commented, files, first_sentence


def test_pages_equal_the_code() -> None:
    assert [
        str(path.relative_to(ROOT))
        for path, text in files()
        if path.read_text() != text
    ] == [], "run `make docs`"


def test_each_page_has_one_generated_part() -> None:
    for page in PARTS:
        assert (ROOT / page).read_text().count(END) == 1, page


def test_tree_has_every_folder() -> None:
    ignored = {
        line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()
    }
    folders = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    }
    assert folders - ignored == set(FOLDERS)


def test_every_setting_has_a_comment() -> None:
    assert [name for _, name, _ in commented(Settings)] == list(Settings.model_fields)


def test_every_module_has_a_docstring() -> None:
    for package in ("producers", "shared", "workers", "feedmill"):
        for path in (ROOT / package).rglob("*.py"):
            assert first_sentence(path).endswith((".", "?")), path
