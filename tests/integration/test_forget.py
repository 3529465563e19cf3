"""`feedmill.forget` from Python, on a real Redis: what is found, what is not, and the log."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from celery import Celery
from redis import Redis

import feedmill
from feedmill.forgetting import celery_results, places, search
from feedmill.forgetting.celery_results import remove_from_results
from feedmill.forgetting.deletion_log import LOG_FILE, by_name, read
from feedmill.forgetting.forget import replay
from feedmill.forgetting.uploads import UPLOADS_PREFIX, remove_uploads
from feedmill.monitoring.flower_state import STATE_FILE
from feedmill.outcomes import copies
from feedmill.outcomes.copies import Copy, note_copy, read_copies, without_password
from feedmill.shared import runs
from feedmill.shared.broker import CLASSIFY_TASK, TRANSPORT_KEYS, queue_lists
from feedmill.shared.messages import DeadLetter, Post
from feedmill.shared.purge import tombstones
from feedmill.shared.results import Result, ResultsStore
from feedmill.shared.settings import Settings
from tests.support import (
    RedisServer,
    body_of,
    has_results,
    make_classification,
    reserve,
    wait_until,
)
from tests.support import feedmill as run_feedmill

DID = "did:plc:abcdefghij234567abcdefgh"
AT_URI = f"at://{DID}/app.bsky.feed.post/3kabcdefgh2"


@pytest.fixture(autouse=True)
def _address(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDMILL_REDIS_URL", redis.url)


def store(redis: RedisServer, *posts: Post) -> None:
    results = [Result(post, make_classification(post.id)) for post in posts]
    ResultsStore(redis.client, Settings()).write(results)


def simple(post_id: str, **fields: Any) -> Post:
    return Post(id=post_id, title="Some text", **fields)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("t3_1abcde", "t3_1abcde"),
        ("t3_1abcde", "1abcde"),
        ("t3_1abcde", " T3_1ABCDE "),
        ("t3_1abcde", "https://www.reddit.com/r/python/comments/1abcde/a_title/"),
        ("t3_1abcde", "old.reddit.com/comments/1ABCDE?utm=1"),
        ("t3_1abcde", "https://redd.it/1abcde"),
        ("1abcde", "https://redd.it/1abcde"),
        ("1abcde", "t3_1abcde"),
        (AT_URI, AT_URI),
        (AT_URI, f"https://bsky.app/profile/{DID}/post/3kabcdefgh2"),
        (AT_URI, DID),
        (AT_URI, f"https://bsky.app/profile/{DID}"),
        ("7", "7"),
        ("row é 7", "row é 7"),
    ],
)
def test_finds_a_post_by_any_form_of_its_id(
    redis: RedisServer, stored: str, asked: str
) -> None:
    store(redis, simple(stored), simple("t3_other"))
    assert feedmill.forget(asked, dry_run=True).ids == [stored]
    assert has_results(redis.client, stored)
    outcome = feedmill.forget(asked)
    assert (outcome.ids, outcome.unmatched, outcome.problems) == ([stored], [], [])
    assert outcome.counts["results"] == 1
    assert not has_results(redis.client, stored)
    assert has_results(redis.client, "t3_other")
    assert tombstones(redis.client, [stored])


def test_an_id_as_it_is_stored_means_itself(redis: RedisServer) -> None:
    store(redis, simple("1abc"), simple("t3_1abc"))
    assert feedmill.forget("1abc").ids == ["1abc"]
    assert has_results(redis.client, "t3_1abc")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("t3_1abcdf", "t3_1abcde"),
        ("t3_2abcde", "t3_1abcde"),
        ("1abcd", "t3_1abcde"),
        ("https://redd.it/1bacde", "t3_1abcde"),
        ("https://bsky.app/profile/alice.example/post/3kabcdefgh2", AT_URI),
        ("at://alice.example/app.bsky.feed.post/3kabcdefgh2", AT_URI),
    ],
)
def test_names_the_post_that_was_probably_meant(
    redis: RedisServer, asked: str, meant: str
) -> None:
    store(redis, simple("t3_1abcde"), simple(AT_URI))
    outcome = feedmill.forget(asked)
    assert (outcome.ids, outcome.unmatched, outcome.similar) == ([], [asked], [meant])
    assert not outcome.is_complete
    assert has_results(redis.client, meant)
    assert tombstones(redis.client, [asked[:100]]) == {}
    assert not (Settings().data_folder / LOG_FILE).exists()


def test_finds_authors_in_messages_dead_letters_and_extra(redis: RedisServer) -> None:
    store(
        redis,
        simple("result", extra={"author": "Ann"}),
        simple("nested", extra={"user": {"name": "ANN", "id": 7}}),
        simple("other", extra={"author": "Anna", "title": "ann"}),
        simple("named ann", topic="ann"),
    )
    with Celery(broker=redis.url, set_as_current=False) as app:
        posts = [
            {"id": "sent", "title": "x", "author": "@ann"},
            {"id": "kept", "title": "x", "author": "bob"},
        ]
        app.send_task(CLASSIFY_TASK, kwargs={"posts": posts}, queue="feedmill")
    letter = DeadLetter(
        id="dead",
        reason="x",
        post=json.dumps({"id": "dead", "title": "x", "username": "ann"}),
        options=None,
        message="m",
        worker="w",
        failed_at=1.0,
    )
    ResultsStore(redis.client, Settings()).write([], [letter])
    outcome = feedmill.forget(author="u/Ann")
    assert sorted(outcome.ids) == ["dead", "nested", "result", "sent"]
    (message,) = redis.client.lrange("feedmill", 0, -1)
    assert body_of(message)[1]["posts"] == [{"id": "sent"}, posts[1]]
    assert redis.client.xlen("feedmill:dead") == 0
    log = (Settings().data_folder / LOG_FILE).read_text()
    assert "ann" not in log.casefold()


def test_finds_values_of_kept_columns_subreddits_and_ids_of_a_file(
    redis: RedisServer, tmp_path: Path
) -> None:
    store(
        redis,
        simple("a", extra={"Customer No": 4711}),
        simple("b", extra={"Customer No": 47110}),
        simple("c", subreddit="Python"),
        simple("d", subreddit="pythons"),
        simple("e"),
        simple("f"),
    )
    assert feedmill.forget(where={"customer no": "4711"}).ids == ["a"]
    assert feedmill.forget(subreddit="r/python").ids == ["c"]
    listed = tmp_path / "requests.csv"
    listed.write_text("who,Post id\nann,e\nann,\nbob,nothing like it\n")
    outcome = feedmill.forget(file=listed, column="post id")
    assert (outcome.ids, outcome.unmatched) == (["e"], ["nothing like it"])
    for post_id in "bdf":
        assert has_results(redis.client, post_id)
    with pytest.raises(feedmill.UserError, match="who, Post id"):
        feedmill.forget(file=listed, column="id")


def test_a_run_goes_and_other_runs_keep_posts_with_the_same_ids(
    redis: RedisServer,
) -> None:
    store(redis, simple("1", run="monday"), simple("2", run="tuesday"))
    with Celery(broker=redis.url, set_as_current=False) as app:
        mixed = [
            {"id": "3", "title": "x", "run": "monday"},
            {"id": "3", "title": "y", "run": "tuesday"},
        ]
        app.send_task(CLASSIFY_TASK, kwargs={"posts": mixed}, queue="feedmill")
    outcome = feedmill.forget(run="monday")
    assert (outcome.ids, outcome.runs, outcome.problems) == ([], ["monday"], [])
    assert not has_results(redis.client, "1")
    assert has_results(redis.client, "2")
    (message,) = redis.client.lrange("feedmill", 0, -1)
    assert body_of(message)[1]["posts"] == [{"id": "3"}, mixed[1]]
    assert feedmill.forget(run="monday").unmatched == ["monday"]
    assert tombstones(redis.client, ["1", "3"]) == {}


def test_a_run_is_deleted_again_after_workers_have_finished_it(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker holds a message of the run, and stores its result after the first deletion."""
    with Celery(broker=redis.url, set_as_current=False) as app:
        post = {"id": "1", "title": "x", "run": "monday"}
        app.send_task(CLASSIFY_TASK, kwargs={"posts": [post]}, queue="feedmill")
    reserve(redis.client, queue_lists("feedmill"), "worker-0", limit=1)
    held = TRANSPORT_KEYS["reserved_key"]

    def finish() -> None:
        wait_until(
            lambda: '"run"' not in str(message_held(redis, held)), "it is redacted"
        )
        store(redis, simple("1", run="monday"))
        redis.client.delete(held)

    worker = Thread(target=finish)
    worker.start()
    outcome = feedmill.forget(run="monday")
    worker.join()
    assert outcome.problems == []
    assert redis.client.xlen("feedmill:results") == 0
    assert runs.progress(redis.client, "monday") is None
    # one that holds it for longer
    with Celery(broker=redis.url, set_as_current=False) as app:
        app.send_task(CLASSIFY_TASK, kwargs={"posts": [post]}, queue="feedmill")
    reserve(redis.client, queue_lists("feedmill"), "worker-1", limit=1)
    monkeypatch.setattr(places, "HELD_WAIT_S", 0.0)
    (problem,) = feedmill.forget(run="monday").problems
    assert "still hold" in problem


def message_held(redis: RedisServer, key: str) -> Any:
    messages: Any = redis.client.hvals(key)
    return [body_of(message) for message in messages]


def test_a_log_is_replayed_after_a_restore(redis: RedisServer) -> None:
    posts = [
        simple("t3_a"),
        simple("b", extra={"author": "Ann"}),
        simple("c", run="monday"),
        simple("d"),
    ]
    # a backup, with a further post of the author, which expires before the deletion
    store(redis, *posts, simple("older", extra={"author": "Ann"}))
    raw: Any = Redis.from_url(redis.url)
    backup = {key: raw.dump(key) for key in raw.scan_iter()}
    redis.client.flushdb()
    store(redis, *posts)
    feedmill.forget("a", note="request 17")
    feedmill.forget(author="ann")
    feedmill.forget(run="monday")
    path = Settings().data_folder / LOG_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    entries = list(read(path))
    deletions = by_name(entries)
    assert [deletion.note for deletion in deletions] == ["request 17", "", ""]
    assert [list(deletion.ids) for deletion in deletions] == [["t3_a"], ["b"], []]
    assert all(deletion.counts for deletion in deletions)

    redis.client.flushdb()
    for key, value in backup.items():
        raw.restore(key, 0, value)
    raw.close()
    outcome = replay(redis.client, Settings(), deletions)
    assert sorted(outcome.ids) == ["b", "older", "t3_a"]
    assert outcome.runs == ["monday"]
    assert outcome.is_complete
    entries_left: Any = redis.client.xrange("feedmill:results")
    left = [fields["id"] for _, fields in entries_left]
    assert left == ["d"]
    assert len(tombstones(redis.client, ["t3_a", "b", "older"])) == 3
    assert len(list(read(path))) == len(entries) + 2


def test_a_replay_leaves_what_was_sent_after_the_deletion(redis: RedisServer) -> None:
    path = Settings().data_folder / LOG_FILE
    post = {"id": "1", "title": "x", "run": "nightly"}
    with Celery(broker=redis.url, set_as_current=False) as app:
        store(
            redis,
            simple("1", run="nightly"),
            simple("2", subreddit="python"),
            simple(AT_URI),
            simple("4", extra={"author": "Ann"}),
        )
        feedmill.forget(run="nightly")
        feedmill.forget(subreddit="python")
        feedmill.forget(DID)
        feedmill.forget(author="Ann")
        app.send_task(CLASSIFY_TASK, kwargs={"posts": [post]}, queue="feedmill")
    newer_uri = f"{AT_URI}x"
    newer = [
        simple("11", run="nightly"),
        simple("12", subreddit="python"),
        simple(newer_uri),
        simple("14", extra={"author": "Ann"}),
    ]
    store(redis, *newer)
    deletions = by_name(read(path))
    preview = replay(redis.client, Settings(), deletions, dry_run=True)
    assert sorted(preview.ids) == sorted(["2", AT_URI, "4"])
    outcome = replay(redis.client, Settings(), deletions)
    for kept in newer:
        assert has_results(redis.client, kept.id)
    assert redis.client.llen("feedmill") == 1
    assert outcome.runs == []
    (problem,) = outcome.problems
    assert "run nightly was sent again" in problem
    # also by a log with that replay
    replay(redis.client, Settings(), by_name(read(path)))
    for kept in newer:
        assert has_results(redis.client, kept.id)


def test_replays_do_not_grow_the_log_and_finish_what_was_interrupted(
    redis: RedisServer, tmp_path: Path
) -> None:
    store(redis, simple("a", extra={"author": "Ann"}), simple("b", subreddit="x"))
    damaged = tmp_path / "damaged.csv"
    damaged.write_text("title\nx\n")
    feedmill.forget(author="ann", exports=damaged)
    feedmill.forget(subreddit="x")
    path = Settings().data_folder / LOG_FILE
    first = by_name(read(path))
    assert [deletion.counts is None for deletion in first] == [True, False]
    sizes = []
    for _ in range(6):
        before = path.stat().st_size
        replay(redis.client, Settings(), by_name(read(path)))
        sizes.append(path.stat().st_size - before)
    assert max(sizes[1:]) <= sizes[0]
    replayed = by_name(read(path))
    assert all(deletion.counts is not None for deletion in replayed)
    values = [value for deletion in replayed for value in deletion.selection.values]
    assert len(values) == len(set(values)) == 1

    # another machine's log gets the deletions with their times, once
    copied = tmp_path / "copied.jsonl"
    path.rename(copied)
    for _ in range(2):
        replay(redis.client, Settings(), by_name(read(copied)))
    imported = {deletion.name: deletion for deletion in by_name(read(path))}
    for deletion in replayed:
        assert imported[deletion.name].at == deletion.at
        assert imported[deletion.name].selection == deletion.selection
    assert len(imported) == len(replayed) + 2


def test_a_line_that_was_not_written_to_its_end_stands_for_no_deletion(
    redis: RedisServer,
) -> None:
    """The disk was full, or the machine crashed: at any byte."""
    path = Settings().data_folder / LOG_FILE
    ids = []
    for number, cut in enumerate((1, 5, 60, 150)):
        post_id = f"post-{number}"
        store(redis, simple(post_id))
        feedmill.forget(post_id)
        ids.append(post_id)
        line = path.read_bytes().splitlines()[0]
        with path.open("ab") as file:
            file.write(line[:cut])
        logged = [list(entry.ids) for entry in by_name(read(path))]
        assert logged == [[logged_id] for logged_id in ids]
    store(redis, simple("last"))
    feedmill.forget("last")
    deletions = by_name(read(path))
    assert [list(deletion.ids) for deletion in deletions] == [
        [i] for i in [*ids, "last"]
    ]
    assert all(deletion.counts for deletion in deletions)
    assert path.read_bytes().endswith(b"\n")


def test_an_entry_without_its_line_end_is_not_lost(redis: RedisServer) -> None:
    store(redis, simple("a"), simple("b"))
    path = Settings().data_folder / LOG_FILE
    feedmill.forget("a")
    first_line = path.read_bytes().splitlines()[0]
    path.write_bytes(first_line)
    assert [list(entry.ids) for entry in by_name(read(path))] == [["a"]]
    feedmill.forget("b")
    assert [list(entry.ids) for entry in by_name(read(path))] == [["a"], ["b"]]


def test_a_damaged_log_is_named(redis: RedisServer) -> None:
    store(redis, simple("a"))
    path = Settings().data_folder / LOG_FILE
    feedmill.forget("a")
    with path.open("a") as file:
        file.write('{"version": 1, "na\n')
    with pytest.raises(feedmill.UserError, match=r"forgotten\.jsonl:3 is not an entry"):
        list(read(path))


def test_an_unwritable_log_prevents_a_deletion(redis: RedisServer) -> None:
    store(redis, simple("a"))
    (Settings().data_folder / LOG_FILE).mkdir(parents=True)
    with pytest.raises(feedmill.UserError, match="Cannot write"):
        feedmill.forget("a")
    assert has_results(redis.client, "a")


def test_copies_that_cannot_be_changed_are_named(
    redis: RedisServer, tmp_path: Path
) -> None:
    store(redis, simple("a"))
    damaged = tmp_path / "damaged.csv"
    damaged.write_text("title\nx\n")
    gone = tmp_path / "gone.csv"
    settings = Settings()
    for path in (damaged, gone):
        note_copy(settings, Copy(kind="export", place=str(path), form="csv"))
    outcome = feedmill.forget("a", exports=tmp_path / "never.csv")
    assert not outcome.is_complete
    named = "\n".join(outcome.problems)
    assert "damaged.csv was not changed" in named
    assert "never.csv does not exist" in named
    assert "gone.csv" not in named  # deleted since
    assert not has_results(redis.client, "a")
    deletion = by_name(read(settings.data_folder / LOG_FILE))[0]
    assert deletion.counts is None  # to be repeated


def test_exports_are_remembered_without_passwords(redis: RedisServer) -> None:
    store(redis, simple("a"))
    folder = Settings().data_folder
    out = folder.parent / "labels.csv"
    feedmill.export(out)
    assert read_copies(Settings()) == [Copy("export", str(out), "csv")]
    assert feedmill.forget("a").counts["exported_rows"] == 1
    assert out.read_text().count("\n") == 1
    address = "postgresql://ann:se%40cret@host:5/db?password=x&sslmode=require"
    plain = without_password(address)
    assert plain == "postgresql://ann@host:5/db?sslmode=require"
    (folder / "copies.json").write_text('[{"kind": 7}, 8, {"kind": "export"}]')
    assert read_copies(Settings()) == []


@pytest.mark.usefixtures("redis")
def test_rejects_what_is_no_selection() -> None:
    wrong: Sequence[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, "Give what to forget"),
        (("",), {}, "not a post id"),
        (("x" * 200,), {}, "not a post id"),
        ((7,), {}, "id must be text"),
        ((), {"account": "alice.example"}, "not an account"),
        ((), {"where": {"": "x"}}, "COLUMN=VALUE"),
        ((), {"author": " "}, "1 to 1,000 characters"),
        ((), {"run": "\n"}, "not the name of a run"),
        ((), {"subreddit": "r/"}, "subreddit"),
        (("a",), {"note": "x" * 501}, "note"),
    ]
    for ids, options, problem in wrong:
        with pytest.raises(feedmill.UserError, match=problem):
            feedmill.forget(*ids, **options)


def test_celery_results_of_forgotten_posts_lose_their_outcomes(
    redis: RedisServer,
) -> None:
    outcomes = [{"id": "gone", "label": "x"}, {"id": "kept", "label": "y"}]
    done = {"status": "SUCCESS", "result": outcomes}
    reason = "post gone: Rhubarb and custard"
    failure = {"exc_type": "MessageFailed", "exc_message": [reason]}
    failed = {"status": "FAILURE", "result": failure, "traceback": reason}
    redis.client.set("celery-task-meta-1", json.dumps(done), ex=3600)
    redis.client.set("celery-task-meta-2", json.dumps(failed), ex=3600)
    redis.client.set("celery-task-meta-3", "not JSON", ex=3600)
    redis.client.zadd("celery-taskset-meta-4.j", {json.dumps([1, "x", outcomes]): 2})
    store(redis, simple("gone"))
    assert feedmill.forget("gone").counts["celery_results"] == 3
    result = json.loads(redis.client.get("celery-task-meta-1") or "")["result"]
    assert feedmill.parse_outcomes([result[0]])[0].id == "gone"
    assert result[1] == outcomes[1]
    for key in ("celery-task-meta-1", "celery-task-meta-2"):
        text = redis.client.get(key) or ""
        assert "Rhubarb" not in text
        assert redis.client.ttl(key) > 3000
    members: Any = redis.client.zrange(
        "celery-taskset-meta-4.j", 0, -1, withscores=True
    )
    ((member, score),) = members
    assert score == 2
    assert '"label": "x"' not in member


def test_a_chord_keeps_its_parts_and_its_expiry_at_any_moment(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery counts a chord's parts once, when one returns: at any moment all must be there."""
    key = "celery-taskset-meta-1.j"
    outcome = [1, "x", [{"id": "gone", "label": "x"}]]
    redis.client.zadd(key, {json.dumps(outcome): 0})
    redis.client.expire(key, 3600)
    raw: Any = Redis.from_url(redis.url)
    counts = []
    execute: Any = Redis.execute_command

    def counting(client: Redis, *arguments: Any, **options: Any) -> Any:
        result = execute(client, *arguments, **options)
        counts.append(execute(raw, "ZCARD", key))
        return result

    monkeypatch.setattr(Redis, "execute_command", counting)
    assert remove_from_results(redis.client, {"gone"}) == 1
    monkeypatch.undo()
    assert set(counts) == {1}
    assert redis.client.ttl(key) > 3000
    assert '"label"' not in str(redis.client.zrange(key, 0, -1))
    raw.close()


def test_results_that_end_meanwhile_do_not_return(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback of a chord deletes its key, and a worker stores another result."""
    chord = "celery-taskset-meta-1.j"
    task = "celery-task-meta-1"
    outcomes = [{"id": "gone", "label": "x"}]
    redis.client.zadd(chord, {json.dumps([1, "x", outcomes]): 0})
    redis.client.set(task, json.dumps({"result": outcomes}))
    other = json.dumps({"result": [{"id": "kept", "label": "y"}]})
    without = celery_results._without

    def meanwhile(text: Any, *arguments: Any) -> Any:
        redis.client.delete(chord)
        if redis.client.get(task) != other:
            redis.client.set(task, other)
        return without(text, *arguments)

    monkeypatch.setattr(celery_results, "_without", meanwhile)
    remove_from_results(redis.client, {"gone"})
    assert redis.client.exists(chord) == 0
    assert redis.client.get(task) == other


@pytest.mark.parametrize(
    ("post_id", "reason", "is_named"),
    [
        ("3", "post 3: no text", True),
        ("3", "a batch of 3 posts failed after 13 s", False),
        ("post-1", "post-10: no text", False),
        ("post-1", "cannot read post-1", True),
        ("café-1", "post café-1: no text", True),
        ('a"b\\c', 'post a"b\\c: no text', True),
        ('a"b\\c', "RequestRefused('post a\"b\\\\c: no text')", True),
    ],
)
def test_reasons_of_failures_are_searched_for_whole_ids(
    redis: RedisServer, post_id: str, reason: str, is_named: bool
) -> None:
    failure = {"exc_type": "MessageFailed", "exc_message": [reason]}
    failed = {"status": "FAILURE", "result": failure, "traceback": reason}
    redis.client.set("celery-task-meta-1", json.dumps(failed))
    assert remove_from_results(redis.client, {post_id}) == is_named
    kept = json.loads(redis.client.get("celery-task-meta-1") or "")
    assert (kept == failed) != is_named


def test_ids_of_other_posts_are_compared_within_bounds(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_LOOKALIKES", 10)
    store(redis, *(simple(f"t3_1abc{number}") for number in range(100)))
    outcome = feedmill.forget("t3_1abcx")
    assert 1 <= len(outcome.similar) <= 5


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a web server's files, alone among the temporary ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{UPLOADS_PREFIX}x"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("post_id", "content", "is_removed"),
    [
        ("t3_gone", b"id,title\ngone,x\n", True),
        (AT_URI, json.dumps({"id": AT_URI}).replace("/", r"\/").encode(), True),
        ("caf\u00e9-1", json.dumps({"id": "caf\u00e9-1"}).encode(), True),
        ("caf\u00e9-1", rb'{"id": "caf\u00E9-1"}', True),
        ("caf\u00e9-1", "id,title\ncaf\u00e9-1,x\n".encode(), True),
        ('a"b-7', b'id,title\n"a""b-7",x\n', True),
        ("post-1", "id,title\npost-1,x\n".encode("utf-16"), True),
        ("7", b"id,title\n7,x\n", True),
        ("7", b'{"id":7,"title":"x"}', True),
        ("7", b"id,title\n17,at 07:00 of 2007\n", False),
        ("t3_gone", b"id,title\nkept,x\n", False),
    ],
)
def test_dropped_files_are_searched_for_ids_as_they_write_them(
    uploads: Path, post_id: str, content: bytes, is_removed: bool
) -> None:
    path = uploads / "posts"
    path.write_bytes(content)
    problems: list[str] = []
    assert remove_uploads({post_id}, problems.append) == is_removed
    assert path.exists() != is_removed
    assert problems == []


def test_a_dropped_file_that_vanishes_does_not_keep_the_others(
    uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        (uploads / f"{number}.csv").write_text("id\npost-1\n")
    is_file = Path.is_file

    def vanishing(path: Path) -> bool:
        exists = is_file(path)
        if path.name in ("0.csv", "3.csv"):
            path.unlink()
        return exists

    monkeypatch.setattr(Path, "is_file", vanishing)
    problems: list[str] = []
    assert remove_uploads({"post-1"}, problems.append) == 4
    assert list(uploads.iterdir()) == []
    assert problems == []


def test_dropped_files_of_other_users_are_named(
    uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedmill.forgetting.uploads.getuid", lambda: -1)
    problems: list[str] = []
    assert remove_uploads({"post-1"}, problems.append) == 0
    (problem,) = problems
    assert f"{uploads} belongs to another user" in problem


def test_a_place_that_was_not_changed_is_changed_by_a_replay(
    redis: RedisServer, tmp_path: Path
) -> None:
    """Nothing else is stored about the posts then: the same command finds none."""
    folder = Settings().data_folder
    environment = {"FEEDMILL_REDIS_URL": redis.url, "FEEDMILL_DATA_FOLDER": str(folder)}

    def forget(*arguments: str) -> Any:
        return run_feedmill("forget", *arguments, cwd=tmp_path, **environment)

    store(redis, simple("t3_1abc"))
    folder.mkdir(parents=True, exist_ok=True)
    flower_file = folder / STATE_FILE
    flower_file.write_text("{")
    done = forget("1abc")
    assert done.returncode == 1
    assert "nothing is stored as 1abc: taken as t3_1abc" in done.stdout
    hint = f"`feedmill forget --replay {folder / LOG_FILE}` repeats it"
    assert hint in done.stderr
    shown = {"kwargs": "{'posts': <1 post: t3_1abc>}"}
    flower_file.write_text(json.dumps({"tasks": [shown]}))
    again = forget("t3_1abc")
    assert again.returncode == 1
    assert hint in again.stderr
    preview = forget("--replay", str(folder / LOG_FILE), "--dry-run")
    assert "would forget t3_1abc" in preview.stdout
    assert json.loads(flower_file.read_text())["tasks"] == [shown]
    replayed = forget("--replay", str(folder / LOG_FILE), "--yes")
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert json.loads(flower_file.read_text())["tasks"] == []
    assert hint not in forget("t3_1abc").stderr


def test_a_copy_that_is_no_longer_noted_is_named(
    redis: RedisServer,  # noqa: ARG001 - for the data folder
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(copies, "MAX_COPIES", 2)
    for name in ("first", "second"):
        note_copy(Settings(), Copy(kind="export", place=f"/{name}.csv", form="csv"))
    assert caplog.text == ""
    note_copy(Settings(), Copy(kind="export", place="/third.csv", form="csv"))
    assert "/first.csv is no longer noted" in caplog.text
