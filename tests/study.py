"""Study a made dump, killed again and again: `python -m tests.study`.

A stand-in for the model labels a post by its text, so that the rows of a run that was killed must
equal those of a run that was not. Prints the counts of both as JSON, and fails if they differ.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import zstandard

from feedmill.offline.model import OfflineModel
from feedmill.producers.records import COMMENTS, POSTS, Filters
from feedmill.shared.messages import Classification, ClassifyOptions, Outcome, Post
from feedmill.shared.settings import Settings
from feedmill.studies import run
from feedmill.studies.parts import part_files
from feedmill.studies.request import StudyRequest
from feedmill.studies.state import read_state

LABELS = ("praise", "complaint", "question")
FIRST_TIME = 1_640_995_200  # 2022
SECONDS_BETWEEN = 120
#: Rows of a chunk: few, so that a killed run is always within one.
PART_ROWS = 3_000
#: A process with the stand-in: DUMPS OUT.
PROGRAM = "from tests.study import work; import sys; work(sys.argv[1], sys.argv[2])"


def classify(posts: Iterable[Post]) -> Generator[tuple[Post, Outcome]]:
    """Label each post by a digest of its text, which has the comment's context."""
    for post in posts:
        number = hashlib.blake2b(post.text.encode(), digest_size=4).digest()[0]
        label = LABELS[number % len(LABELS)]
        scores = dict.fromkeys(LABELS, 0.1) | {label: 0.8}
        yield (
            post,
            Classification(
                id=post.id,
                label=label,
                scores=scores,
                model="stand-in",
                revision=None,
                weights="0" * 64,
                fingerprint=f"{number:032}",
                classified_at=0.0,
                worker="study",
                device="cpu",
                queued_seconds=None,
            ),
        )


def stand_in(*_: Any) -> OfflineModel:
    return OfflineModel(
        labels=LABELS,
        classify=classify,
        recipe="stand-in",
        name="stand-in",
        revision=None,
        weights="0" * 64,
    )


def work(dumps: str, out: str) -> None:
    """Study the dumps with the stand-in."""
    setattr(run, "load_offline", stand_in)  # noqa: B010 - a stand-in of another type
    request = StudyRequest(
        dumps=[dumps],
        out=Path(out),
        filters=Filters(kinds=frozenset({POSTS, COMMENTS})),
        options=ClassifyOptions(),
        context=True,
        part_rows=PART_ROWS,
    )
    run.Study(request, Settings()).run()


def make_dumps(folder: Path, posts: int, comments: int) -> None:
    """Write RS_2022.zst and RC_2022.zst: some records are removed, malformed or without a text."""
    folder.mkdir()
    chance = random.Random(58)
    words = [f"word{number}" for number in range(500)]

    def submissions() -> Iterator[str]:
        for number in range(posts):
            record = {
                "id": f"p{number}",
                "title": " ".join(chance.choices(words, k=6)),
                "selftext": "[removed]" if number % 41 == 0 else "",
                "subreddit": chance.choice(["AskReddit", "askreddit", "news"]),
                "created_utc": FIRST_TIME + SECONDS_BETWEEN * number,
                "author": "somebody",
            }
            yield json.dumps(record)

    def replies() -> Iterator[str]:
        for number in range(comments):
            if number % 997 == 0:
                yield "no JSON"
                continue
            record = {
                "id": f"c{number}",
                "body": ""
                if number % 53 == 0
                else " ".join(chance.choices(words, k=9)),
                "link_id": f"t3_p{chance.randrange(posts + posts // 10 + 1)}",
                "parent_id": "t1_x",
                "subreddit": "AskReddit",
                "created_utc": str(FIRST_TIME + SECONDS_BETWEEN * number),
            }
            yield json.dumps(record)

    for name, lines in (("RS_2022.zst", submissions()), ("RC_2022.zst", replies())):
        with zstandard.open(folder / name, "wt", encoding="utf-8") as file:
            for line in lines:
                file.write(f"{line}\n")


def start(dumps: Path, out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(dumps), str(out)])


def position(out: Path) -> int:
    """Return the records that a study's state counts."""
    with suppress(OSError):
        state = read_state(out)
        if state is not None:
            return state.records
    return 0


def kill_while_writing(dumps: Path, out: Path, chance: random.Random) -> bool:
    """Kill a run that has written at least one chunk; return whether it was still running."""
    before = position(out)
    process = start(dumps, out)
    chunks = chance.randint(1, 6)
    while process.poll() is None:
        if position(out) >= before + chunks * PART_ROWS:
            # at any moment of the next chunk: reading, writing parts or saving the state
            time.sleep(chance.random() / 5)
            process.send_signal(signal.SIGKILL)
            return process.wait() == -signal.SIGKILL
        time.sleep(0.002)
    return False


def rows_of(out: Path) -> list[tuple[Any, ...]]:
    """Return all rows with their month, sorted."""
    rows: list[tuple[Any, ...]] = []
    for path, _ in part_files(out):
        columns = pq.ParquetFile(path).read().to_pydict()
        month = [path.parent.name] * len(columns["id"])
        texts = [map(str, column) for column in columns.values()]
        rows.extend(zip(month, *texts, strict=True))
    return sorted(rows)


def compare(folder: Path, posts: int, comments: int, kills: int) -> dict[str, Any]:
    """Study the same dumps with and without kills; return the counts. Raises AssertionError."""
    dumps = folder / "dumps"
    make_dumps(dumps, posts, comments)
    whole = folder / "whole"
    began = time.monotonic()
    assert start(dumps, whole).wait() == 0
    seconds = time.monotonic() - began
    killed = folder / "killed"
    chance = random.Random(1)
    count = 0
    while count < kills and kill_while_writing(dumps, killed, chance):
        count += 1
    assert start(dumps, killed).wait() == 0
    expected = rows_of(whole)
    rows = rows_of(killed)
    states = [read_state(out) for out in (whole, killed)]
    for state in states:
        assert state is not None
        assert state.is_complete
        assert state.rows == len(expected)
        state.seconds = 0
    assert states[0] == states[1]
    missing = len(set(expected).difference(rows))
    ids = [row[1] for row in rows]
    counts = {
        "rows": len(rows),
        "expected": len(expected),
        "missing": missing,
        "twice": len(ids) - len(set(ids)),
        "equal": rows == expected,
        "kills": count,
        "seconds_of_whole_run": round(seconds, 1),
    }
    assert counts["equal"], counts
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--posts", type=int, default=200_000)
    parser.add_argument("--comments", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="feedmill-study-") as folder:
        counts = compare(
            Path(folder),
            options.posts,
            options.comments,
            options.kills,
        )
    sys.stdout.write(f"{json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
