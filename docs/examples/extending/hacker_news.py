"""A source that enqueues Hacker News stories from its search API (https://hn.algolia.com/api).

curl "https://hn.algolia.com/api/v1/search_by_date?tags=story" | python hacker_news.py
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from producers.push import Pusher
from shared.broker import connect, make_app, user_errors
from shared.errors import PostRefused, UserError
from shared.messages import ClassifyOptions, Post
from shared.settings import load


def posts(answer: dict[str, Any]) -> Iterator[Post]:
    """Yield the stories that can be classified; print an error for every other story."""
    for hit in answer["hits"]:
        story = {
            "id": f"hn-{hit['objectID']}",
            "title": hit["title"],
            "body": re.sub(r"<[^>]*>", " ", hit.get("story_text") or ""),
            "url": hit.get("url"),
            "score": hit.get("points"),
            "created_utc": hit.get("created_at_i"),
        }
        try:
            yield Post.parse(story)
        except PostRefused as refused:
            print(f"{story['id']}: {refused}", file=sys.stderr)


def main() -> None:
    settings = load()
    with user_errors(settings):
        pusher = Pusher(make_app(settings), connect(settings), settings, ClassifyOptions())
        pusher.push(posts(json.load(sys.stdin)))
    print(f"{pusher.sent} sent, {pusher.skipped} skipped as sent before")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
