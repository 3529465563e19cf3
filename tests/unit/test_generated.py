"""What of the documentation is written by the code is as the code would write it now."""

from shared import keys
from shared.settings import Settings
from tests.generated import END, FOLDERS, PACKAGES, PARTS, ROOT, commented, docstring, files


def test_pages_say_what_the_code_says() -> None:
    assert [str(path.relative_to(ROOT)) for path, text in files() if path.read_text() != text] == [], "run `make docs`"


def test_each_page_has_one_part() -> None:
    for page in PARTS:
        assert (ROOT / page).read_text().count(END) == 1, page


def test_the_tree_has_every_folder() -> None:
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert folders - ignored == set(FOLDERS)


def test_every_setting_has_a_comment() -> None:
    assert [name for _, name, _ in commented(Settings)] == list(Settings.model_fields)


def test_every_key_of_ours_has_a_comment() -> None:
    declared = {name for _, name, _ in commented(keys)}
    names = {name for name, value in vars(keys).items() if name.isupper() and isinstance(value, str)}
    assert names <= declared


def test_every_module_says_what_it_is() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert docstring(path).endswith((".", "?")), path
