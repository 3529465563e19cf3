"""Feeds files: TOML, OPML, and what is wrong with them."""

from pathlib import Path

import pytest

from feedmill.producers.feeds import subscriptions
from feedmill.producers.feeds.subscriptions import Feed, as_opml, read, server_of
from feedmill.shared.errors import UserError


def write(folder: Path, text: str, name: str = "feeds.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_reads_addresses_and_tables(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[feeds]\nblog = "https://example.org/feed"\n'
        '[feeds.news]\nurl = "http://10.0.0.1:8080/rss"\ntopic = "The news"\ninterval = 900\n',
    )
    feeds = read(path)
    assert feeds == {
        "blog": Feed(url="https://example.org/feed"),
        "news": Feed(url="http://10.0.0.1:8080/rss", topic="The news", interval=900),
    }


def test_server_is_scheme_host_and_port() -> None:
    assert server_of("HTTPS://Example.ORG/a") == ("https", "example.org", 443)
    assert server_of("http://example.org:80/") == server_of("http://u@EXAMPLE.org/b?c")
    assert server_of("http://example.org:8080/") != server_of("http://example.org/")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "feeds"),
        ("[feeds]", "feeds"),
        ("[feeds", "not valid TOML"),
        ('[feeds]\nblog = "example.org/feed"', "write an address such as"),
        ('[feeds]\nblog = "ftp://example.org/feed"', "write an address such as"),
        ('[feeds]\nblog = "file:///etc/passwd"', "write an address such as"),
        ('[feeds]\nblog = "https://"', "write an address such as"),
        ('[feeds]\nblog = "https://example.org:odd/"', "blog"),
        ('[feeds]\nblog = "https://[::1/"', "blog"),
        ("[feeds]\nblog = 5", "blog"),
        ('[feeds]\n"a b" = "https://example.org/"', "a b"),
        ('[feeds.blog]\nurl = "https://example.org/"\ninterval = 1', "interval"),
        ('[feeds.blog]\nurl = "https://example.org/"\nevery = 60', "every"),
        (
            '[feeds]\nblog = "https://example.org/"\nblog = "https://example.org/"',
            "TOML",
        ),
    ],
)
def test_explains_what_is_wrong(text: str, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read(path)
    assert problem in str(error.value)
    assert "feeds.toml" in str(error.value)


def test_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


OPML = """<?xml version="1.0"?><opml version="2.0"><body>
<outline text="Science"><outline type="rss" text="A Blog!" xmlUrl="https://example.org/a"/>
<outline type="rss" text="A Blog!" xmlUrl="https://example.org/b"/></outline>
<outline xmlUrl="https://example.org/a" text="again"/>
<outline xmlUrl="https://user:secret@example.net/feed.xml"/><outline text="empty"/>
</body></opml>"""


def test_reads_opml(tmp_path: Path) -> None:
    feeds = read(write(tmp_path, OPML, "feeds.opml"))
    assert feeds == {
        "a-blog": Feed(url="https://example.org/a", topic="Science"),
        "a-blog-2": Feed(url="https://example.org/b", topic="Science"),
        "example-net-feed-xml": Feed(url="https://user:secret@example.net/feed.xml"),
    }


def test_spaces_around_an_address_do_not_make_another_feed(tmp_path: Path) -> None:
    text = (
        '<opml><body><outline text="a" xmlUrl=" https://example.org/a"/>'
        '<outline text="a" xmlUrl="https://example.org/a "/></body></opml>'
    )
    feeds = read(write(tmp_path, text, "feeds.opml"))
    assert feeds == {"a": Feed(url="https://example.org/a")}


def test_blank_title_of_a_folder_is_none(tmp_path: Path) -> None:
    text = (
        '<opml><body><outline title=" " text="Science">'
        '<outline text="a" xmlUrl="https://example.org/a"/></outline></body></opml>'
    )
    feeds = read(write(tmp_path, text, "feeds.opml"))
    assert feeds["a"].topic == "Science"


@pytest.mark.parametrize(
    "address",
    [
        "https://example.org/feed?token=s3cret",
        "https://example.org/feed?s3cret",
        "https://example.org/feed#s3cret",
        "https://user:s3cret@example.org/feed",
        "https://user:p@s3cret@example.org/feed",
        "  HTTPS://s3cret@example.org/feed?a=/s3cret",
    ],
)
@pytest.mark.parametrize("title", ["", "Новости", "!"])
def test_secrets_of_an_address_are_not_in_its_name(
    title: str, address: str, tmp_path: Path
) -> None:
    """The name is in posts' ids, keys, logs and the status."""
    text = (
        f'<opml><body><outline text="{title}" xmlUrl="{address}"/>'
        f'<outline text="{title}" xmlUrl="{address}#b"/></body></opml>'
    )
    feeds = read(write(tmp_path, text, "feeds.opml"))
    assert list(feeds) == ["example-org-feed", "example-org-feed-2"]
    assert [feed.url for feed in feeds.values()] == [
        address.strip(),
        f"{address}#b".strip(),
    ]


def test_opml_that_was_written_has_the_same_feeds(tmp_path: Path) -> None:
    feeds = {
        "blog": Feed(url="https://example.org/?a=1&b=<2>"),
        "news": Feed(url="https://example.org/news", topic='"A & B"'),
    }
    path = tmp_path / "feeds.opml"
    path.write_bytes(as_opml(feeds))
    assert read(path) == feeds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<opml>",
        "<opml/>",
        '<opml><body><outline xmlUrl="javascript:alert(1)"/></body></opml>',
        '<!DOCTYPE o [<!ENTITY a SYSTEM "file:///etc/passwd">]><opml>&a;</opml>',
        '<!DOCTYPE o [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><opml>&b;</opml>',
    ],
)
def test_odd_opml_is_explained(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="feeds\\.opml") as error:
        read(write(tmp_path, text, "feeds.opml"))
    assert "root:" not in str(error.value)


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MAX_FEEDS", 2)
    with pytest.raises(UserError, match="more than 2 feeds"):
        read(write(tmp_path, OPML, "feeds.opml"))
    monkeypatch.setattr(subscriptions, "MAX_FILE_BYTES", 100)
    with pytest.raises(UserError, match="larger than"):
        read(write(tmp_path, OPML, "feeds.opml"))
