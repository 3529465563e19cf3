"""The bundled posts: ten per default topic, as uneven in length as real posts."""

import html
import re
from collections import Counter
from pathlib import Path

from feedmill.shared.messages import Post
from feedmill.shared.results import Result
from feedmill.shared.settings import TOPICS
from feedmill.stack.demo import SAMPLE_ROWS, random_sample, sample_posts
from tests.support import make_classification

README = Path(__file__).parent.parent.parent / "README.md"


def test_sample_posts_cover_topics_and_lengths() -> None:
    posts = sample_posts()
    assert Counter(post.topic for post in posts) == dict.fromkeys(TOPICS, 10)
    assert len({post.id for post in posts}) == len({post.text for post in posts}) == 160
    assert 0.5 < sum(not post.body for post in posts) / 160 < 0.75
    assert max(len(post.text.split()) for post in posts) > 1000


def labelled(post: Post, label: str) -> Result:
    found = make_classification(
        post.id,
        label=label,
        scores={label: 1.0},
        weights="0" * 64,
        fingerprint="f" * 32,
        classified_at=0.0,
    )
    return Result(post, found)


def test_draws_the_same_posts_whatever_their_labels() -> None:
    posts = sample_posts()
    right = random_sample([labelled(post, post.topic or "") for post in posts])
    wrong = random_sample([labelled(post, "none") for post in posts])
    assert [result.post.id for result in right] == [result.post.id for result in wrong]
    assert len({result.post.id for result in right}) == SAMPLE_ROWS
    assert [result.post for result in right] != posts[:SAMPLE_ROWS]


def test_readme_shows_the_sample() -> None:
    """The README quotes a part of a run: whole titles of posts, and marks that agree with their
    topics.
    """
    (block,) = re.findall(
        r"^ +label +score  post$.*?^```$", README.read_text(), re.MULTILINE | re.DOTALL
    )
    titles = {
        " ".join(html.unescape(post.title).split()): post.topic
        for post in sample_posts()
    }
    lines = re.findall(r"^([✓✗])  (\S+) +0\.\d\d   (.*)$", block, re.MULTILINE)
    assert len(lines) >= 3
    assert all(
        (mark == "✓") == (titles[title] == label) for mark, label, title in lines
    )
