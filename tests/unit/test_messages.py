"""shared/messages.py: posts, their text, options, fingerprints and rejected input."""

import json
import re
from datetime import UTC, date, datetime, time
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedmill.producers.records import removal_of
from feedmill.shared.errors import PostRefused, RequestRefused
from feedmill.shared.messages import (
    MESSAGE_VERSION,
    ClassifyOptions,
    Post,
    clean,
    digest,
    fingerprint,
    parse_id,
)


@pytest.mark.parametrize(
    ("title", "body", "text"),
    [
        ("A title", "A body", "A title\n\nA body"),
        ("A title", "", "A title"),
        ("A title", "[removed]", "A title"),
        ("A title", " [deleted]\n", "A title"),
        ("", "A body", "A body"),
        ("Fish &amp; chips &gt; all", "&quot;yes&quot;", 'Fish & chips > all\n\n"yes"'),
        ("  spaced ", "\nlines\n", "spaced\n\nlines"),
        (
            "https://example.org/?id=1&region=eu&copy=2",
            "f(&not_null)",
            "https://example.org/?id=1&region=eu&copy=2\n\nf(&not_null)",
        ),
        ("&amp;amp;copy; &#169; &#xA9;", "&unknown; R&D;", "© © ©\n\n&unknown; R&D;"),
        ("[removed]", "A body", "A body"),
        (
            "[removed] from the menu",
            "[Removed by the cook]",
            "[removed] from the menu\n\n[Removed by the cook]",
        ),
    ],
)
def test_text_joins_cleaned_title_and_body(title: str, body: str, text: str) -> None:
    assert clean(title, body) == text
    assert Post(id="1", title=title, body=body).text == text


#: What Reddit and its archives show in place of removed and deleted texts.
PLACEHOLDERS = [
    "[removed]",
    "[deleted]",
    " [Removed]\n",
    "[deleted by user]",
    "[Removed by moderator]",
    "[ Removed by moderator ]",
    "[ Removed by Reddit ]",
    "[ Removed by Reddit in response to a copyright notice. ]",
    "[ Removed by Reddit on account of violating the "
    "[content policy](/help/contentpolicy). ]",
]


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_placeholder_is_no_text(placeholder: str) -> None:
    assert clean("A title", placeholder) == "A title"
    assert clean(placeholder, "A body") == "A body"
    assert removal_of({"title": "A title", "selftext": placeholder})
    assert removal_of({"title": placeholder, "selftext": ""})
    for fields in ({"title": placeholder}, {"title": placeholder, "body": "[removed]"}):
        with pytest.raises(PostRefused, match="must contain text"):
            Post.parse({"id": "x", **fields})


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({}, "id"),
        ({"id": "", "title": "x"}, "id"),
        ({"id": "x" * 129, "title": "x"}, "id"),
        ({"id": "x"}, ""),
        ({"id": "x", "title": " "}, ""),
        ({"id": "x", "body": "[deleted]"}, ""),
        ({"id": "x", "title": "t" * 4001}, "title"),
        ({"id": "x", "body": "b" * 100_001}, "body"),
        ({"id": "x", "title": ["t"]}, "title"),
        ({"id": "x", "title": "t", "score": "many"}, "score"),
        ({"id": "x", "title": "t", "created_utc": float("inf")}, "created_utc"),
        ({"id": "x", "title": "t", "created_utc": -1}, "created_utc"),
        ({"id": "x", "title": "t", "extra": {"note": "n" * 5000}}, "extra"),
        ({"id": "x", "title": "t", "extra": {"half": "\ud83d"}}, "extra"),
        (
            {
                "id": "x",
                "title": "t",
                "extra": {"deep": json.loads("[" * 254 + "]" * 254)},
            },
            "extra",
        ),
        ("a post", ""),
        (None, ""),
    ],
)
def test_rejected_post_names_the_field(raw: object, field: str) -> None:
    with pytest.raises(PostRefused) as refused:
        Post.parse(raw)
    assert refused.value.field == field
    assert refused.value.reason


def test_authors_are_never_stored() -> None:
    post = Post.parse(
        {"id": "1", "title": "x", "author": "jane", "author_fullname": "t2_x"}
    )
    assert "jane" not in post.model_dump_json()
    assert "t2_x" not in post.model_dump_json()


#: Missing values as pandas, Celery and JSON hold them. NaT and NA stand for pandas' classes of
#: these names.
MISSING = [
    None,
    float("nan"),
    Decimal("NaN"),
    Decimal("sNaN"),
    type("NaTType", (), {})(),
    type("NAType", (), {})(),
]


@pytest.mark.parametrize("missing", MISSING, ids=lambda value: type(value).__name__)
def test_missing_values_are_not_text(missing: object) -> None:
    names = [name for name in Post.model_fields if name not in ("id", "title")]
    assert Post.parse(
        {"id": "1", "title": "good work"} | dict.fromkeys(names, missing)
    ) == Post(id="1", title="good work")
    assert (
        Post.parse({"id": "1", "title": missing, "body": "good work"}).text
        == "good work"
    )
    for raw in (
        {"id": missing, "title": "x"},
        {"id": "1", "title": missing, "body": missing},
    ):
        with pytest.raises(PostRefused) as refused:
            Post.parse(raw)
        assert refused.value.field == ("" if raw["id"] == "1" else "id")
        assert refused.value.post_id == (None if raw["id"] is missing else "1")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (time(3, 4), "03:04:00"),
        (Decimal("1.50"), "1.50"),
        (b"bytes", "bytes"),
    ],
    ids=str,
)
def test_accepts_all_types_of_celerys_json(value: object, text: str) -> None:
    post = Post.parse(
        {
            "id": value,
            "title": value,
            "topic": value,
            "run": value,
            "extra": {"x": [value, {"y": value}]},
        }
    )
    assert (post.id, post.title, post.topic, post.run) == (text, text, text, text)
    assert post.extra == {"x": [text, {"y": text}]}
    assert parse_id(value) == text
    assert Post.parse(json.loads(post.model_dump_json())) == post


def test_accepts_dates_as_times() -> None:
    for value in (
        date(2026, 1, 2),
        datetime(2026, 1, 2),
        datetime(2026, 1, 2, tzinfo=UTC),
    ):
        assert (
            Post.parse({"id": 1, "title": "x", "created_utc": value}).created_utc
            == 1767312000.0
        )


def test_rejects_other_types_in_extra() -> None:
    for value in (object(), {1}, UUID):
        with pytest.raises(PostRefused, match="extra"):
            Post.parse({"id": 1, "title": "x", "extra": {"x": value, "y": UUID(int=7)}})


def test_replaces_lone_surrogates() -> None:
    post = Post.parse(json.loads('{"id": "1", "title": "half a \\ud83d smile"}'))
    assert post.text.encode()
    assert post.text.startswith("half a ")


@given(st.text(), st.text())
def test_any_valid_text_survives_serialization(title: str, body: str) -> None:
    try:
        post = Post.parse({"id": "1", "title": title, "body": body})
    except PostRefused:
        return
    again = Post.parse(json.loads(post.model_dump_json(exclude_defaults=True)))
    assert again == post
    assert again.text == post.text


@pytest.mark.parametrize("given_labels", ["a, b,c,", ["a", "b", "c"], ("a", "b", "c")])
def test_reads_labels_from_text_or_list(given_labels: object) -> None:
    assert ClassifyOptions.parse({"labels": given_labels}).labels == {
        "a": ("a",),
        "b": ("b",),
        "c": ("c",),
    }


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({"labels": 5}, "labels", r"\bint\b"),
        ({"labels": {"a": 5}}, "labels.a", ""),
        ({"labels": []}, "labels", ""),
        ({"labels": " , "}, "labels", ""),
        ({"labels": ["a", "a"]}, "labels", "'a'"),
        ({"labels": ["a", 5]}, "labels", r"\bint\b"),
        ({"labels": [{"a": 1}]}, "labels", r"\bdict\b"),
        ({"labels": ["x"] * 10 + [str(n) for n in range(200_000)]}, "labels", "'x'"),
        ({"labels": {"a": ""}}, "labels.a.0", ""),
        ({"labels": [str(n) for n in range(257)]}, "labels", ""),
        ({"template": "no place"}, "template", "{}"),
        ({"version": 0}, "version", ""),
        ({"version": None}, "version", ""),
        ({"multi_label": "maybe"}, "multi_label", ""),
        ({"lables": "a"}, "lables", ""),
    ],
)
def test_rejected_options_name_the_field(
    options: dict[str, object], field: str, named: str
) -> None:
    with pytest.raises(RequestRefused, match=f"^{re.escape(field)}: .*{named}"):
        ClassifyOptions.parse(options)


def test_options_are_sent_without_defaults() -> None:
    assert ClassifyOptions().arguments() == {}
    options = ClassifyOptions.parse({"labels": "a", "strict": True})
    assert options.arguments() == {"labels": {"a": ["a"]}, "strict": True}


@pytest.mark.parametrize("version", [1, "1", 1.0])
def test_accepts_the_current_version_and_drops_it(version: object) -> None:
    options = ClassifyOptions.parse({"version": version, "labels": "a"})
    assert options.version == MESSAGE_VERSION
    assert options == ClassifyOptions.parse({"labels": "a"})
    # Producers deduplicate by the options' JSON, which must not depend on the message version.
    assert "version" not in options.model_dump_json()
    assert options.arguments() == {"labels": {"a": ["a"]}}


def test_fingerprints_differ_by_id_text_and_recipe() -> None:
    post = Post(id="1", title="x")
    assert fingerprint(post, "r") == fingerprint(Post(id="1", title="x", score=5), "r")
    others = {
        fingerprint(Post(id="2", title="x"), "r"),
        fingerprint(Post(id="1", title="y"), "r"),
        fingerprint(post, "s"),
    }
    assert fingerprint(post, "r") not in others
    assert digest("ab", "c") != digest("a", "bc")
