"""shared/messages.py: posts, their text, options, fingerprints and rejected input."""

import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedmill.shared.errors import PostRefused, RequestRefused
from feedmill.shared.messages import MESSAGE_VERSION, ClassifyOptions, Post, clean, digest, fingerprint


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
        ("[removed]", "", "[removed]"),
    ],
)
def test_text_joins_cleaned_title_and_body(title: str, body: str, text: str) -> None:
    assert clean(title, body) == text
    assert Post(id="1", title=title, body=body).text == text


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
        ({"id": "x", "title": "t", "extra": {"deep": json.loads("[" * 254 + "]" * 254)}}, "extra"),
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
    post = Post.parse({"id": "1", "title": "x", "author": "jane", "author_fullname": "t2_x"})
    assert "jane" not in post.model_dump_json()
    assert "t2_x" not in post.model_dump_json()


#: Missing values as pandas, Celery and JSON hold them. NaT and NA stand for pandas' classes of these names.
MISSING = [None, float("nan"), Decimal("NaN"), Decimal("sNaN"), type("NaTType", (), {})(), type("NAType", (), {})()]


@pytest.mark.parametrize("missing", MISSING, ids=lambda value: type(value).__name__)
def test_missing_values_are_not_text(missing: object) -> None:
    names = [name for name in Post.model_fields if name not in ("id", "title")]
    assert Post.parse({"id": "1", "title": "good work"} | dict.fromkeys(names, missing)) == Post(
        id="1", title="good work"
    )
    assert Post.parse({"id": "1", "title": missing, "body": "good work"}).text == "good work"
    for raw in ({"id": missing, "title": "x"}, {"id": "1", "title": missing, "body": missing}):
        with pytest.raises(PostRefused) as refused:
            Post.parse(raw)
        assert refused.value.field == ("" if raw["id"] == "1" else "id")
        assert refused.value.post_id == (None if raw["id"] is missing else "1")


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
    assert ClassifyOptions.parse({"labels": given_labels}).labels == {"a": ("a",), "b": ("b",), "c": ("c",)}


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
def test_rejected_options_name_the_field(options: dict[str, object], field: str, named: str) -> None:
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
