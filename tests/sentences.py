"""What the program tells people when something fails: each sentence that it raises, read off its syntax trees.

tests/generated.py lists them in docs/errors.md; tests/unit/test_errors.py looks for each in what the tests say.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shared import errors
from shared.errors import FeedmillError

ROOT = Path(__file__).parent.parent
CLASSES = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, FeedmillError) and found is not FeedmillError
}
#: What is raised where pydantic makes one of ours of it: by file, and class in it.
VALIDATED = {
    ("shared/address.py", ""): "SettingsError",
    ("shared/settings.py", ""): "SettingsError",
    ("shared/settings.py", "Settings"): "SettingsError",
    ("producers/reddit/topics.py", ""): "SettingsError",
    ("shared/messages.py", "Post"): "PostRefused",
    ("shared/messages.py", "ClassifyOptions"): "RequestRefused",
    ("shared/messages.py", ""): "RequestRefused",
}
REFUSED_CREDENTIALS = "producers/reddit/client.py:refused_credentials"
#: Where the words stand that are not beside their `raise`: functions, or a class, of a file. None of them: the words
#: are another error's, a library's or a device's.
ELSEWHERE: dict[tuple[str, str], tuple[str, ...]] = {
    ("feedmill/supervisor.py", "self._user_error"): (),
    ("feedmill/training_data.py", "_nothing(len(kept), options)"): ("feedmill/training_data.py:_nothing",),
    (
        "feedmill/training_job.py",
        """message if process.returncode == 2 else f"The training failed, see the trainer's log: {message}\"""",
    ): (),
    (
        "feedmill/measuring_commands.py",
        "_no_truth(posts, [label for label in label_sets[0] if all((label in one for one in label_sets))])",
    ): ("feedmill/measuring_commands.py:_no_truth",),
    ("producers/push.py", "self._settings.queue_limit, self.sent"): ("shared/errors.py:QueueFull",),
    ("producers/reddit/client.py", "missing_credentials(found[1] if found else 'client_id')"): (
        "producers/reddit/client.py:missing_credentials",
    ),
    ("producers/reddit/client.py", "refused_credentials(settings)"): (REFUSED_CREDENTIALS,),
    ("producers/reddit/daemon.py", "refused_credentials(self._settings)"): (REFUSED_CREDENTIALS,),
    ("shared/address.py", "_malformed()"): ("shared/address.py:_malformed",),
    ("shared/address.py", "_no_scheme(url)"): ("shared/address.py:_no_scheme",),
    ("shared/broker.py", "said"): tuple(f"shared/broker.py:{name}" for name in ("_why", "_refusal", "_insecurity")),
    ("shared/messages.py", "str(post_id)[:MAX_ID] if post_id else None, *first_problem(error)"): (),
    ("workers/consumer.py", "reason"): (),
    ("workers/consumer.py", "what"): (),
    ("workers/engines/outputs.py", "text"): (),
    ("workers/hub.py", "self._explain(error)"): ("workers/hub.py:_explain",),
    ("workers/hub.py", "self._no_revision()"): ("workers/hub.py:_no_revision",),
    ("workers/plugins.py", "_not_imported(module, setting, error)"): ("workers/plugins.py:_not_imported",),
    ("workers/batch_loop.py", "str(error)"): (),
    ("workers/pipeline.py", "what"): (),
}
#: Words of a text that make it a sentence, and not a part of one.
SENTENCE = 6
#: Characters in a row by which a test reads a sentence; all of its longest part, where that has less.
RUN = 20


class Sentence(NamedTuple):
    """What is raised: the error's class, its words with … for what differs, and the files that raise it."""

    error: str
    words: str
    files: tuple[str, ...]


def text_of(node: ast.AST) -> str | None:
    """The text that an expression is, with … in the place of what is only known when it runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "…" for part in parts)
        case ast.FormattedValue(value=ast.Name(id="PREFIX")):
            return "FEEDMILL_"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return "".join(text_of(side) or "…" for side in (left, right))
    return None


def texts_in(node: ast.AST) -> Iterator[str]:
    """The texts in it that are no docstring, each as a whole."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        text = text_of(child)
        if text is None:
            yield from texts_in(child)
        else:
            yield text


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def written_at(place: str) -> Iterator[str]:
    """The sentences of a function or a class, as file:name."""
    path, _, name = place.partition(":")
    (node,) = [node for node in ast.walk(parsed(path)) if getattr(node, "name", None) == name]
    yield from (text for text in texts_in(node) if len(text.split()) >= SENTENCE)


def raised_in(path: str) -> Iterator[tuple[str, str]]:
    """(error, words) of each error that a file makes."""
    for top in parsed(path).body:
        validated = VALIDATED.get((path, top.name if isinstance(top, ast.ClassDef) else ""))
        for node in ast.walk(top):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                error = validated if node.func.id == "ValueError" else node.func.id
                if error in CLASSES:
                    words = text_of(node.args[-1])
                    if words is not None:
                        yield error, words
                    else:
                        raised = (path, ", ".join(map(ast.unparse, node.args)))
                        assert raised in ELSEWHERE, f"say in ELSEWHERE where the words of {raised} stand"
                        for place in ELSEWHERE[raised]:
                            yield from ((error, words) for words in written_at(place))


@cache
def sentences() -> tuple[Sentence, ...]:
    """All that are raised: by class as in shared/errors.py, then by file. What has no words of its own is left out."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for package in ("feedmill", "producers", "shared", "workers"):
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            for error, words in raised_in(path):
                files = found[error, words]
                files += [path] * (path not in files)
    order = list(CLASSES)
    return tuple(
        Sentence(error, words, tuple(files))
        for (error, words), files in sorted(found.items(), key=lambda item: order.index(item[0][0]))
        if runs(words)
    )


def runs(words: str) -> set[str]:
    """The characters in a row by which a sentence may be known."""
    parts = words.split("…")
    length = min(RUN, max(map(len, parts)))
    return {part[at : at + length] for part in parts for at in range(len(part) - length + 1)} if length > 1 else set()
