"""feedmill/teaching/answer_file.py: one file of answers, for several writers."""

import csv
import threading
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.errors import UserError
from feedmill.shared.messages import MAX_BODY, MAX_TITLE, Post
from feedmill.teaching import answer_file
from feedmill.teaching.answer_file import AnsweredPost, AnswerFile, key_of
from tests.support import naming


def answered(number: int, label: str = "food", **more: Any) -> AnsweredPost:
    post = Post(id=f"p{number}", title=f"bread {number}", body='a\r\nb, "c"\n')
    return AnsweredPost(post=post, label=label, why="random", fits_none=False, **more)


def test_writers_at_once_lose_no_answer(tmp_path: Path) -> None:
    """Each writer has a view of its own, as processes have."""

    def write(writer: int) -> None:
        file = AnswerFile(tmp_path)
        for number in range(20):
            file.put([answered(100 * writer + number, by=f"w{writer}")])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = AnswerFile(tmp_path).read()
    assert len({answer.key for answer in answers}) == len(answers) == 80


def test_keeps_order_who_when_and_columns_of_others(tmp_path: Path) -> None:
    first = answered(1, by="Ana", at="2026-11-28T20:00:00Z", was="sports", was_by="ab")
    skipped = AnsweredPost(
        post=Post(id="p2", title="x"), label="", why="first", fits_none=False
    )
    none = AnsweredPost(
        post=Post(id="p3", title="y", run="r"),
        label="",
        why="uncertain",
        fits_none=True,
    )
    AnswerFile(tmp_path).put([first, skipped, none])
    assert AnswerFile(tmp_path).read() == [first, skipped, none]
    path = tmp_path / "labels.csv"
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    rows[0].append("note")
    rows[1].append("to discuss")
    rows[2].append("")
    rows[3].append("")
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    file_again = AnswerFile(tmp_path)
    file_again.put([answered(4)])
    others = [answer.others for answer in AnswerFile(tmp_path).read()]
    assert others == [{"note": "to discuss"}, {}, {}, {}]


def test_an_answer_to_the_same_post_replaces_the_earlier_one(tmp_path: Path) -> None:
    """Posts of two runs with one id are two posts."""
    file = AnswerFile(tmp_path)
    other = answered(1).post.model_copy(update={"run": "other"})
    file.put([answered(1), answered(2)])
    file.put([AnsweredPost(post=other, label="food", why="", fits_none=False)])
    file.put([answered(1, "sports")])
    assert [answer.label for answer in file.read()] == ["food", "food", "sports"]
    file.remove([key_of(other), key_of(Post(id="unknown", title="x"))])
    assert [answer.post.id for answer in file.read()] == ["p2", "p1"]


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n", "id,title,body,label,picked\n,x,,food,\n", "\0", "id,title,body,"
             'label,picked\n1,"x,,food,\n', "id,title,body,label,picked\n1,x,,food,,,,extra\n"]
)  # fmt: skip
def test_a_damaged_file_is_named_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=naming("labels.csv")):
        AnswerFile(tmp_path).put([answered(1)])
    assert path.read_text() == text


def test_a_file_without_columns_of_the_pages_stays_without_them(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path)
    file.put([answered(1)])
    assert file.path.read_text().splitlines()[0] == "id,title,body,label,picked"


def test_a_file_never_grows_so_large_that_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_file, "MAX_BYTES", 200)
    file = AnswerFile(tmp_path)
    file.put([answered(1)])
    with pytest.raises(UserError, match="more than 200 bytes"):
        file.put([answered(number) for number in range(2, 20)])
    (answer,) = AnswerFile(tmp_path).read()
    assert answer.post.id == "p1"
    file.put([answered(2)])
    assert len(AnswerFile(tmp_path).read()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_the_longest_post_can_be_read_again(tmp_path: Path) -> None:
    post = Post(id="long", title='"' * MAX_TITLE, body='"' * MAX_BODY)
    answer = AnsweredPost(post=post, label="food", why="random", fits_none=False)
    AnswerFile(tmp_path).put([answer])
    (read,) = AnswerFile(tmp_path).read()
    assert read.post == post
