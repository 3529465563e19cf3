"""shared/messages.py: what is a post, what is its text, and what is refused with which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import MessageFailed, PostRefused, RequestRefused
from shared.messages import MESSAGE_VERSION, ClassifyOptions, Post, PostError, clean, digest, fingerprint, parse_posts


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
def test_the_text_of_a_post(title: str, body: str, text: str) -> None:
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
        ({"id": "x", "title": "t", "score": 2**60}, "score"),
        ({"id": "x", "title": "t", "created_utc": float("nan")}, "created_utc"),
        ({"id": "x", "title": "t", "created_utc": -1}, "created_utc"),
        ({"id": "x", "title": "t", "extra": {"note": "n" * 5000}}, "extra"),
        ({"id": "x", "title": "t", "extra": "note"}, "extra"),
        ({"id": "x", "title": "t", "extra": {"half": "\ud83d"}}, "extra"),
        ({"id": "x", "title": "t", "extra": {"deep": json.loads("[" * 254 + "]" * 254)}}, "extra"),
        ("a post", ""),
        (None, ""),
    ],
)
def test_a_bad_post_is_refused_with_the_fields_name(raw: object, field: str) -> None:
    with pytest.raises(PostRefused) as refused:
        Post.parse(raw)
    assert refused.value.field == field
    assert refused.value.reason


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"note": "n" * 5000}, "extra: 5011 bytes of JSON; at most 4096 "),
        ({"half": "\ud83d"}, "extra: "),
    ],
)
def test_what_cannot_be_attached(extra: object, words: str) -> None:
    with pytest.raises(PostRefused, match=f"^{words}"):
        Post.parse({"id": "x", "title": "t", "extra": extra})


def test_a_bad_post_does_not_stop_the_others() -> None:
    good, bad, none, other = parse_posts([{"id": "1", "title": "x"}, {"id": "2"}, "two", {"id": "3", "body": "y"}])
    assert isinstance(good, Post)
    assert isinstance(other, Post)
    assert bad == PostError(id="2", error="neither title nor body holds any text")
    assert none == PostError(id=None, error="a post must be a JSON object")


def test_authors_are_never_kept() -> None:
    post = Post.parse({"id": "1", "title": "x", "author": "somebody", "author_fullname": "t2_x"})
    assert "somebody" not in post.model_dump_json()


def test_what_other_applications_attach_is_kept() -> None:
    assert Post.parse({"id": "1", "title": "x", "extra": {"row": 7}}).extra == {"row": 7}


def test_lone_surrogates_are_replaced_rather_than_refused() -> None:
    post = Post.parse(json.loads('{"id": "1", "title": "half a \\ud83d smile"}'))
    assert post.text.encode()
    assert post.text.startswith("half a ")


@given(st.text(), st.text())
def test_any_text_makes_a_post_or_a_refusal_and_survives_the_wire(title: str, body: str) -> None:
    try:
        post = Post.parse({"id": "1", "title": title, "body": body})
    except PostRefused:
        return
    again = Post.parse(json.loads(post.model_dump_json(exclude_defaults=True)))
    assert again == post
    assert again.text == post.text


@pytest.mark.parametrize("given_labels", ["a, b,c,", ["a", "b", "c"], ("a", "b", "c")])
def test_labels_as_text_or_list(given_labels: object) -> None:
    assert ClassifyOptions.parse({"labels": given_labels}).labels == {"a": ("a",), "b": ("b",), "c": ("c",)}


def test_labels_with_descriptions() -> None:
    labels = {"film": "movies and television", "sea": ["the sea", "a beach"]}
    read = {"film": ("movies and television",), "sea": ("the sea", "a beach")}
    assert ClassifyOptions.parse({"labels": labels}).labels == read


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"labels": 5}, "labels: expected a list, names separated by commas, or an object of descriptions; got int"),
        ({"labels": {"a": 5}}, "labels.a: expected a description, or a list of them"),
        ({"labels": []}, "labels: name at least one label"),
        ({"labels": " , "}, "labels: name at least one label"),
        ({"labels": ["a", "a"]}, "labels: the label 'a' is named twice"),
        ({"labels": ["a", 5]}, "labels: expected names, got int"),
        ({"labels": ["a", "a "]}, "labels: the label 'a' is named twice"),
        ({"labels": [{"a": 1}]}, "labels: expected names, got dict"),
        ({"labels": {str(n): "x" for n in range(257)}}, "labels: name at least one label, and at most 256"),
        ({"labels": ["x"] * 10 + [str(n) for n in range(200_000)]}, "labels: the label 'x' is named twice"),
        ({"labels": {"a": ""}}, "labels.a.0: string should have at least 1 character"),
        ({"labels": {}}, "labels: name at least one label"),
        ({"labels": [str(n) for n in range(257)]}, "labels: "),
        ({"template": "no place"}, "template: must contain {}"),
        ({"multi_label": "maybe"}, "multi_label: "),
        ({"lables": "a"}, "lables: "),
    ],
)
def test_wrong_options_are_refused_with_the_reason(options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        ClassifyOptions.parse(options)
    assert str(refused.value).startswith(words)


def test_options_travel_without_their_defaults() -> None:
    assert ClassifyOptions().arguments() == {}
    asked = ClassifyOptions.parse({"labels": "a", "strict": True})
    assert asked.arguments() == {"labels": {"a": ["a"]}, "strict": True}


@pytest.mark.parametrize("version", [1, "1", 1.0])
def test_a_message_of_this_version_is_read_and_the_version_goes_no_further(version: object) -> None:
    options = ClassifyOptions.parse({"version": version, "labels": "a"})
    assert options.version == MESSAGE_VERSION
    assert options == ClassifyOptions.parse({"labels": "a"})
    # Producers remember what they sent by these: another version of the message is no other question.
    assert "version" not in options.model_dump_json()
    assert options.arguments() == {"labels": {"a": ["a"]}}


@pytest.mark.parametrize("others", [{}, {"of_tomorrow": 1}, {"labels": 7, "top_k": -1}])
def test_a_newer_message_is_refused_for_that_first(others: dict[str, object]) -> None:
    with pytest.raises(RequestRefused) as refused:
        ClassifyOptions.parse({**others, "version": MESSAGE_VERSION + 1})
    assert str(refused.value).startswith(f"version: version {MESSAGE_VERSION + 1} ")
    assert str(refused.value).endswith(f"version {MESSAGE_VERSION}")


@pytest.mark.parametrize("version", [0, -1, None, "one", 1.5])
def test_what_is_no_version(version: object) -> None:
    with pytest.raises(RequestRefused, match="version: input should be"):
        ClassifyOptions.parse({"version": version})


def test_fingerprints_tell_apart_what_differs() -> None:
    post = Post(id="1", title="x")
    assert fingerprint(post, "r") == fingerprint(Post(id="1", title="x", score=5), "r")
    others = {
        fingerprint(Post(id="2", title="x"), "r"),
        fingerprint(Post(id="1", title="y"), "r"),
        fingerprint(post, "s"),
    }
    assert fingerprint(post, "r") not in others
    assert digest("ab", "c") != digest("a", "bc")


def test_a_failed_message_quotes_a_few_reasons() -> None:
    error = MessageFailed.of([f"{n}: bad" for n in range(5)], posts=6)
    assert str(error) == "5 of 6 posts failed: 0: bad; 1: bad; 2: bad; and 2 more"
