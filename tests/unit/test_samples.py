"""The bundled posts: ten per default topic, as uneven in length as real posts."""

from collections import Counter

from feedmill.demo import sample_posts
from shared.topics import TOPICS


def test_sample_posts_cover_topics_and_lengths() -> None:
    posts = sample_posts()
    assert Counter(post.topic for post in posts) == dict.fromkeys(TOPICS, 10)
    assert len({post.id for post in posts}) == len({post.text for post in posts}) == 160
    assert 0.5 < sum(not post.body for post in posts) / 160 < 0.75
    assert max(len(post.text.split()) for post in posts) > 1000
