"""Draw docs/images/trace.png, the spans of one message: `python -m tests.trace_picture`.

Needs Debian's chromium, a redis-server, and the embedded model.
"""

import tempfile
from html import escape
from pathlib import Path

from feedmill.shared.settings import Settings
from tests.fakes.collector import Collector, Span, collecting
from tests.screenshots import IMAGES, browser, bundled_posts
from tests.support import (
    RedisServer,
    as_jsonl,
    feedmill,
    push,
    redis_servers,
    wait_until,
    wait_until_empty,
    working,
)

NS_PER_MS = 1_000_000
COLORS = {
    "publish": "#7a5195", "wait": "#bbbbbb", "process": "#374c80", "prepare": "#2f9e8f",
    "forward": "#ef5675", "store": "#ffa600", "acknowledge": "#6c757d", "micro-batch": "#c2185b",
}  # fmt: skip
#: Order and depth of the rows; micro-batches come last.
DEPTHS = {
    "publish": 0, "wait": 1, "process": 1, "prepare": 2, "forward": 2, "store": 2,
    "acknowledge": 2, "micro-batch": 0,
}  # fmt: skip
STYLE = """
body { font: 15px/1.3 "DejaVu Sans", sans-serif; margin: 24px; width: 1100px; color: #222 }
h1 { font-size: 17px; font-weight: 600; margin: 0 0 2px }
p { margin: 0 0 14px; color: #666; font-size: 13px }
.row { display: flex; align-items: center; height: 30px; border-top: 1px solid #eee }
.name { width: 250px; white-space: nowrap; box-sizing: border-box }
.lane { position: relative; flex: 1; height: 100% }
.bar { position: absolute; top: 7px; height: 16px; min-width: 2px; border-radius: 3px }
.time { position: absolute; top: 6px; font-size: 12px; color: #444; white-space: nowrap }
"""


def recorded_spans(folder: Path) -> list[Span]:
    """Run a worker on the bundled posts; return the spans of one message and its micro-batches."""
    server = RedisServer(next(iter(redis_servers().values())), folder)
    # Titles alone, so that no step hides the others.
    posts = [post.model_copy(update={"body": ""}) for post in bundled_posts()]
    with collecting() as collector:
        environment = {
            "FEEDMILL_REDIS_URL": server.url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        try:
            with working(server, folder, **environment):
                settings = Settings.model_validate({"redis_url": server.url})
                push(settings, posts[96:])  # the first forward passes take longer
                wait_until_empty(server.client)
                (folder / "posts.jsonl").write_text(as_jsonl(posts[:96]))
                feedmill("enqueue", "posts.jsonl", cwd=folder, **environment)
                wait_until_empty(server.client)
                wait_until(lambda: chosen(collector), "a whole trace arrives")
        finally:
            server.stop()
        return chosen(collector)


def chosen(collector: Collector) -> list[Span]:
    """Return the spans of the first published message, and those of its micro-batches; none until
    all have arrived.
    """
    published = sorted(collector.spans("publish"), key=lambda span: span.began_at)
    if not published:
        return []
    trace_id = published[0].trace_id
    spans = [span for span in collector.spans() if span.trace_id == trace_id]
    forwards = [span for span in spans if span.name == "forward"]
    if len(spans) < 7 or not forwards:
        return []
    (forward,) = forwards
    batches = {link.span_id for link in forward.links}
    spans += [span for span in collector.spans() if span.span_id in batches]
    order = list(DEPTHS)
    return sorted(
        spans, key=lambda span: (order.index(span.name.split()[0]), span.began_at)
    )


def page(spans: list[Span]) -> str:
    """Return the page with the waterfall."""
    began_at = min(span.began_at for span in spans)
    length = max(span.ended_at for span in spans) - began_at
    rows = []
    for span in spans:
        kind = span.name.split()[0]
        left = 62 * (span.began_at - began_at) / length
        width = 62 * (span.ended_at - span.began_at) / length
        milliseconds = (span.ended_at - span.began_at) / NS_PER_MS
        posts = span.attributes.get("feedmill.posts")
        note = f"{milliseconds:.1f} ms"
        if kind == "micro-batch":
            messages = span.attributes["feedmill.messages"]
            tokens = span.attributes["feedmill.tokens"]
            note += f": {posts} posts, {tokens} tokens; messages: {messages}"
        elif posts:
            note += f": {posts} posts"
        rows.append(
            f'<div class="row"><div class="name" style="padding-left:{22 * DEPTHS[kind]}px">'
            f"{escape(span.name)}</div>"
            f'<div class="lane"><div class="bar" style="left:{left:.2f}%;width:{width:.2f}%;'
            f'background:{COLORS[kind]}"></div>'
            f'<div class="time" style="left:calc({left + width:.2f}% + 6px)">{note}</div>'
            "</div></div>"
        )
    title = f"Trace {spans[0].trace_id}"
    note = "One message, from its sender to its acknowledgement; below, the linked micro-batches."
    return (
        f"<!doctype html><style>{STYLE}</style><h1>{title}</h1><p>{note}</p>"
        f"{''.join(rows)}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mill-") as name:
        spans = recorded_spans(Path(name))
    with browser() as chromium:
        view = chromium.new_page(viewport={"width": 1150, "height": 300})
        view.set_content(page(spans))
        view.screenshot(path=str(IMAGES / "trace.png"), full_page=True)


if __name__ == "__main__":
    main()
