"""The text of HTML."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedmill.producers.html_text import text_of


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("a < b and c > d", "a < b and c > d"),
        ("<3 you", "<3 you"),
        ("AT&T &amp; more", "AT&T & more"),
        ("<p>One</p><p>Two<br>Three</p>", "One\n\nTwo\nThree"),
        ("<ul><li>a</li><li>b</li></ul>", "a\n\nb"),
        ("<p>a <b>bold</b>\n\t word</p>", "a bold\nword"),
        ("<script>evil()</script>good<style>p {}</style>", "good"),
        ("good<script>evil(", "good"),
        ("<svg><text>hidden</text></svg>shown", "shown"),
        ("<!-- comment -->shown<![CDATA[x]]>", "shown"),
        ("<a href='x' title='>'>link</a>", "link"),
        ("<br/><hr/>x", "x"),
    ],
)
def test_keeps_text_and_breaks(html: str, text: str) -> None:
    assert text_of(html) == text


@given(st.text(alphabet="<>/!-[]&;ab \n\"'=scriptCDATA", max_size=200))
def test_any_text_has_a_text(html: str) -> None:
    assert isinstance(text_of(html), str)
