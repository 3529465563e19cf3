"""Comments and posts of public dumps: the layouts of 2012 to 2026, as small made files."""

import json
from pathlib import Path
from typing import Any

import pytest

from feedmill.producers import titles
from feedmill.producers.files import FileSource
from feedmill.producers.records import (
    COMMENT,
    COMMENTS,
    NO_COMMENT,
    NO_TEXT,
    POSTS,
    BadRecord,
    Filters,
    LeftOut,
    parse_kinds,
)
from feedmill.producers.titles import Titles, posts_with_titles, titles_of
from feedmill.shared.errors import InputError, UserError
from feedmill.shared.messages import Post

BOTH = Filters(kinds=frozenset({POSTS, COMMENTS}))
#: A post and a comment of each year, with the fields that matter of each layout.
DUMPS: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
    # Pushshift's first dumps: times as text, names, no permalink of comments.
    2012: (
        {
            "id": "nynwc", "name": "t3_nynwc", "title": "A new year", "selftext": "Hello.",
            "subreddit": "AskReddit", "subreddit_id": "t5_2qh1i", "created_utc": "1325376001",
            "edited": False, "is_self": True, "over_18": False, "score": 5, "ups": 7, "downs": 2,
            "permalink": "/r/AskReddit/comments/nynwc/a_new_year/", "author": "Ann",
        },
        {
            "id": "c3e6z3y", "name": "t1_c3e6z3y", "body": "Thanks &amp; bye.",
            "subreddit": "AskReddit", "created_utc": "1325376100", "edited": False, "score": 3,
            "ups": 3, "downs": 0, "link_id": "t3_nynwc", "parent_id": "t3_nynwc", "gilded": 0,
            "score_hidden": False, "retrieved_on": 1428102411, "author": "[deleted]",
        },
    ),
    # no names any more, times as numbers
    2016: (
        {
            "id": "3yyz2b", "title": "A new year", "selftext": "Hello.", "subreddit": "AskReddit",
            "created_utc": 1451606401, "edited": False, "over_18": False, "score": 5,
            "permalink": "/r/AskReddit/comments/3yyz2b/a_new_year/", "author": "Ann",
        },
        {
            "id": "cyhrw1h", "body": "Thanks &amp; bye.", "subreddit": "AskReddit",
            "created_utc": 1451606500, "edited": 1451606600, "score": 3,
            "link_id": "t3_3yyz2b", "parent_id": "t1_cyhrw00", "author": "Bob",
        },
    ),
    # permalinks of comments, awards, and a parent as a number in some months
    2019: (
        {
            "id": "abcde1", "title": "A new year", "selftext": "Hello.", "subreddit": "AskReddit",
            "created_utc": 1546300801, "score": 5, "media_only": False, "spoiler": False,
            "permalink": "/r/AskReddit/comments/abcde1/a_new_year/", "author": "Ann",
        },
        {
            "id": "ed1abcd", "body": "Thanks &amp; bye.", "subreddit": "AskReddit",
            "created_utc": 1546300900, "score": 3, "link_id": "t3_abcde1",
            "parent_id": 31234567890, "stickied": False, "all_awardings": [],
            "permalink": "/r/AskReddit/comments/abcde1/a_new_year/ed1abcd/", "author": "Bob",
        },
    ),
    # Arctic Shift: names and its own fields
    2023: (
        {
            "id": "17vcabc", "name": "t3_17vcabc", "title": "A new year", "selftext": "Hello.",
            "subreddit": "AskReddit", "created_utc": 1672531201.0, "score": 5,
            "removed_by_category": None, "_meta": {"retrieved_2nd_on": 1672700000},
            "permalink": "/r/AskReddit/comments/17vcabc/a_new_year/", "author": "Ann",
        },
        {
            "id": "k9abcde", "name": "t1_k9abcde", "body": "Thanks &amp; bye.",
            "subreddit": "AskReddit", "created_utc": 1672531300, "score": 3,
            "link_id": "t3_17vcabc", "parent_id": "t3_17vcabc", "author": "Bob",
            "permalink": "/r/AskReddit/comments/17vcabc/a_new_year/k9abcde/",
            "_meta": {"is_edited": False},
        },
    ),
    # ids in no order, longer ones, and no name
    2026: (
        {
            "id": "1q0zz9k", "title": "A new year", "selftext": "Hello.", "subreddit": "AskReddit",
            "created_utc": 1767225601, "score": 5, "author": "Ann",
            "url": "https://www.reddit.com/r/AskReddit/comments/1q0zz9k/a_new_year/",
        },
        {
            "id": "oz4k9w2qt7", "body": "Thanks &amp; bye.", "subreddit": "AskReddit",
            "created_utc": 1767225700, "link_id": "t3_1q0zz9k", "parent_id": "t1_0aa93kd01b",
            "author": "Bob",
        },
    ),
}  # fmt: skip


def dump(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def posts_of(path: Path, filters: Filters = BOTH, **options: Any) -> list[Post]:
    items = FileSource(str(path), filters=filters, **options).items()
    return [item for item in items if isinstance(item, Post)]


@pytest.mark.parametrize("year", DUMPS)
def test_reads_posts_and_comments_of_each_layout(tmp_path: Path, year: int) -> None:
    submission, reply = DUMPS[year]
    path = dump(tmp_path / "dump.jsonl", submission, reply)
    post, comment = posts_of(path)
    assert post.id == f"t3_{submission['id']}"
    assert (post.kind, post.title, post.body) == (None, "A new year", "Hello.")
    assert comment.id == f"t1_{reply['id']}"
    assert (comment.kind, comment.title) == ("comment", "")
    assert comment.text == "Thanks & bye."
    assert (comment.subreddit, post.subreddit) == ("AskReddit", "AskReddit")
    for item, record in ((post, submission), (comment, reply)):
        assert item.created_utc == float(record["created_utc"])
    assert posts_of(path, Filters(kinds=frozenset({COMMENTS}))) == [comment]
    assert posts_of(path, Filters()) == [post]


@pytest.mark.parametrize("year", DUMPS)
def test_a_comment_has_the_title_of_its_post_as_context(
    tmp_path: Path, year: int
) -> None:
    """The comments may come first, and in another file."""
    submission, reply = DUMPS[year]
    posts = dump(tmp_path / "RS.jsonl", submission)
    comments = dump(tmp_path / "RC.jsonl", reply)
    with titles_of([str(posts)]) as titles:
        [comment] = posts_of(comments, titles=titles)
        [row] = FileSource(str(comments), filters=BOTH, titles=titles).rows()
    assert comment.text == "A new year\n\nThanks & bye."
    assert isinstance(row.post, Post)
    assert row.post.text == comment.text
    both = dump(tmp_path / "both.jsonl", reply, submission)
    with titles_of([str(both)]) as titles:
        first, _ = posts_of(both, titles=titles)
    assert first == comment


def test_posts_have_the_same_bytes_as_before() -> None:
    post = Post.parse({"id": "1", "title": "x"})
    assert post.model_dump_json(exclude_defaults=True) == '{"id":"1","title":"x"}'
    assert Post.parse({"id": "1", "title": "x", "kind": {"of": "its own"}}) == post
    comment = Post.parse({"id": "1", "body": "x", "kind": "comment"})
    stored = comment.model_dump_json(exclude_defaults=True)
    assert stored == '{"id":"1","body":"x","kind":"comment"}'


@pytest.mark.parametrize(
    ("fields", "item"),
    [
        ({"body": "[removed]"}, LeftOut.REMOVED),
        ({"body": " [deleted] "}, LeftOut.REMOVED),
        ({"_meta": {"was_deleted_later": True}}, LeftOut.REMOVED),
        ({"body": "  &#x200B;\n".replace("&#x200B;", "")}, NO_TEXT),
        ({"body": None}, NO_TEXT),
    ],
)
def test_a_comment_without_its_own_text_is_left_out(
    tmp_path: Path, fields: dict[str, Any], item: Any
) -> None:
    """The title of its post says nothing about it."""
    submission, reply = DUMPS[2023]
    path = dump(tmp_path / "dump.jsonl", submission, reply | fields)
    with titles_of([str(path)]) as titles:
        source = FileSource(str(path), filters=BOTH, titles=titles)
        _, outcome = source.items()
        [_, row] = source.rows()
    if isinstance(outcome, BadRecord):
        outcome = outcome.reason  # type: ignore[assignment]
    assert outcome == item
    assert isinstance(row.post, str)


def test_reasons_name_what_was_not_read(tmp_path: Path) -> None:
    path = dump(tmp_path / "dump.jsonl", *DUMPS[2016])
    _, bad = FileSource(str(path)).items()
    assert isinstance(bad, BadRecord)
    assert (bad.reason, bad.skipped) == (COMMENT, True)
    only_comments = Filters(kinds=frozenset({COMMENTS}))
    rows = FileSource(str(path), filters=only_comments).rows()
    assert [row.post if isinstance(row.post, str) else "" for row in rows] == [
        NO_COMMENT,
        "",
    ]


def test_filters_by_author_and_words(tmp_path: Path) -> None:
    submission, reply = DUMPS[2016]
    path = dump(tmp_path / "dump.jsonl", submission, reply)
    for filters, ids in (
        (BOTH._replace(authors=frozenset({"bob"})), ["t1_cyhrw1h"]),
        (BOTH._replace(words=("NEW  year",)), ["t3_3yyz2b"]),
        (BOTH._replace(words=("thank",)), []),  # whole words
        (BOTH._replace(words=("hello", "bye")), ["t3_3yyz2b", "t1_cyhrw1h"]),
        (BOTH._replace(words=("c++", "(bye")), []),
    ):
        assert [post.id for post in posts_of(path, filters)] == ids
    assert "author" not in posts_of(path)[0].model_dump()


@pytest.mark.parametrize("text", ["comment", "posts;comments", " , "])
def test_refuses_unknown_kinds(text: str) -> None:
    with pytest.raises(InputError, match="--kind"):
        parse_kinds(text)
    assert parse_kinds(" Posts, comments,") == {POSTS, COMMENTS}


def test_titles_survive_a_second_reading_of_a_file(tmp_path: Path) -> None:
    path = dump(tmp_path / "RS.jsonl", DUMPS[2012][0])
    for _ in range(2):
        with Titles(tmp_path / "titles.sqlite") as titles:
            titles.add_file("RS.jsonl", posts_with_titles(str(path)))
            assert titles.has_file("RS.jsonl")
            assert titles.title_of("t3_nynwc") == "A new year"
            assert titles.title_of("t3_other") == ""
            assert not titles.has_file("RC.jsonl")
    with pytest.raises(InputError, match="--titles"):
        list(posts_with_titles("-"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite refuses the pages as it does on a full disk."""
    schema = f"{titles.SCHEMA} PRAGMA max_page_count = 5;"
    monkeypatch.setattr(titles, "SCHEMA", schema)
    posts = [Post(id=f"t3_{number}", title=str(number) * 99) for number in range(9999)]
    with Titles(tmp_path / "titles.sqlite") as full:
        with pytest.raises(UserError, match=r"titles\.sqlite: .*full\. Make room"):
            full.add_file("RS.jsonl", posts)
        assert not full.has_file("RS.jsonl")


def test_a_folder_that_cannot_hold_titles_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot keep the titles"):
        Titles(tmp_path / "none" / "titles.sqlite")


@pytest.mark.parametrize(
    ("place", "is_seen_at_once"), [(0, True), (1, False), (2, False), (5, False)]
)
def test_damaged_titles_are_made_anew(
    tmp_path: Path, place: int, is_seen_at_once: bool
) -> None:
    """Wherever the damage is: at once, or by the next start after an error that says so."""
    path = tmp_path / "titles.sqlite"
    posts = [Post(id=f"t3_{number}", title=f"title {number}") for number in range(999)]
    with Titles(path) as whole:
        whole.add_file("RS.jsonl", posts)
    data = bytearray(path.read_bytes())
    start = place * 4096
    data[start : start + 4096] = b"\xa5" * 4096
    path.write_bytes(data)

    def read_all() -> list[str]:
        with Titles(path) as again:
            if not again.has_file("RS.jsonl"):
                again.add_file("RS.jsonl", posts)
            return [again.title_of(post.id) for post in posts]

    if is_seen_at_once:
        assert read_all() == [post.title for post in posts]
        return
    with pytest.raises(UserError, match="Run the same command again"):
        read_all()
    assert read_all() == [post.title for post in posts]
