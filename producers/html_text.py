"""The text of HTML: without tags, scripts and styles, with line breaks between blocks."""

import re
from html.parser import HTMLParser

#: Maximum characters of HTML that are read.
MAX_HTML = 400_000
#: Elements whose contents are not text.
HIDDEN = frozenset({"script", "style", "template", "noscript", "head", "svg"})
#: Elements that begin a new line, and those that begin a new paragraph.
LINES = frozenset({"br", "div", "li", "tr", "dt", "dd", "hr", "section", "article"})
PARAGRAPHS = frozenset(
    {"p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "table", "pre", "blockquote"}
)
#: The start of a tag. Other uses of `<` are text: "a < b".
TAG = re.compile(r"<[A-Za-z/!?]")


def text_of(html: str) -> str:
    """Return the text of HTML; a text without tags and entities as it is."""
    html = html[:MAX_HTML]
    if not TAG.search(html) and "&" not in html:
        return html.strip()
    reader = _Reader()
    reader.feed(html)
    reader.close()
    text = "".join(reader.parts)
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


class _Reader(HTMLParser):
    """Collects the text in `parts`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        #: Hidden elements that are open. Elements that are never closed hide the rest, as in
        #: browsers.
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag in HIDDEN:
            self._hidden.append(tag)
        elif tag in PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in LINES:
            self.parts.append("\n")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag not in HIDDEN:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()
        elif tag in PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in LINES:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)
