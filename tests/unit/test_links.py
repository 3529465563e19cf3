"""Links and file names in pages and code lead to existing files and headings.

Links to the web are not checked. DECISIONS.md and CHANGELOG.md may name removed files.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = (
    "feedmill",
    "producers",
    "workers",
    "shared",
    "tests",
    "benchmarks",
    "docs",
    "docker",
)
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
]
#: Inline code that names a file or folder of the project. Users create docker/.env themselves.
NAMED = re.compile(rf"(?!docker/\.env$)(?:{'|'.join(FOLDERS)})/[\w./*-]*")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for path, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()
    ):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    if page.name in ("DECISIONS.md", "CHANGELOG.md"):
        return
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        if NAMED.fullmatch(code):
            assert list(ROOT.glob(code.rstrip("/"))), code


def test_pages_named_in_code_exist() -> None:
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (
                ".py",
                ".yml",
                ".yaml",
                ".json",
                ".conf",
                ".sh",
                ".service",
            ):
                for page, anchor in re.findall(
                    r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", file.read_text()
                ):
                    assert (ROOT / page).exists(), f"{file}: {page}"
                    assert not anchor or anchor in anchors(ROOT / page), (
                        f"{file}: {page}#{anchor}"
                    )


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }
