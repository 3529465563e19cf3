"""The selection of posts to forget: ids in any form, an account, an author, a run, a subreddit,
or a value of a kept column.

The names of authors and the values of columns are personal data themselves. They are compared by
their salted digests, so that the log of deletions need not name them.
"""

import json
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from feedmill.outcomes.post_forms import account_of
from feedmill.producers.records import normalize_key
from feedmill.shared.errors import UserError, printable
from feedmill.shared.messages import MAX_ID, parse_run

#: Names of fields with a post's author, in the form of `normalize_key`. Messages and dead letters
#: hold fields as they were sent; results only those in `extra`.
AUTHOR_FIELDS = frozenset({
    "account", "author", "author_fullname", "author_id", "author_name", "by", "creator", "handle",
    "screen_name", "user", "user_id", "user_name", "username",
})  # fmt: skip
#: Fields of an object in place of an author's name.
NAME_FIELDS = ("id", "login", "name", "screen_name", "username")
#: Prefixes that people write before a name.
NAME_PREFIXES = ("/u/", "u/", "/user/", "user/", "@")
SUBREDDIT_PREFIXES = ("/r/", "r/")
#: Maximum characters of a name or a value.
MAX_VALUE = 1000
SALT_BYTES = 16
DIGEST_BYTES = 16


class ValueDigest(NamedTuple):
    """A value that is compared by its digest.

    column: its name, in the form of `normalize_key`; "" for an author. salt: hexadecimal.
    """

    column: str
    salt: str
    digest: str

    def is_of(self, value: object) -> bool:
        """Return whether a value has the digest."""
        return _digest(self.salt, _normalized(value)) == self.digest


def digest_of(column: str, value: str) -> ValueDigest:
    """Return the digest of a value. Raises UserError if it is empty or too long."""
    text = _normalized(value)
    if not 1 <= len(text) <= MAX_VALUE:
        raise UserError(
            f"A name or a value must have 1 to {MAX_VALUE:,} characters, not {len(text):,}."
        )
    salt = secrets.token_hex(SALT_BYTES)
    return ValueDigest(
        column=normalize_key(column),
        salt=salt,
        digest=_digest(salt, text),
    )


def _normalized(value: object) -> str:
    """Return a value without differences in case, and in what people write before names."""
    text = str(value).strip().casefold()
    return _without_prefix(text, NAME_PREFIXES)


def _without_prefix(text: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return text


def _digest(salt: str, text: str) -> str:
    data = text.encode("utf-8", "replace")
    digest = blake2b(
        data,
        digest_size=DIGEST_BYTES,
        salt=bytes.fromhex(salt)[:16],
    )
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The posts to forget.

    accounts: DIDs. values: authors, and values of columns. until: the times, in seconds since
    1970, up to which the posts of accounts, subreddits and values are meant; without one, all.
    """

    ids: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    subreddits: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    values: tuple[ValueDigest, ...] = ()
    until: Mapping[str | ValueDigest, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        parts = (self.ids, self.accounts, self.subreddits, self.runs, self.values)
        return any(parts)

    def covered_until(self, post_id: str, record: Mapping[str, Any]) -> float:
        """Return the time up to which posts like this one are selected, by its account, its
        subreddit, its author or a value: infinity for all, minus infinity for none.

        record: the post's fields, as any place has them.
        """
        latest = -math.inf
        for part in self._parts_with(post_id, record):
            until = self.until.get(part, math.inf)
            latest = max(latest, until)
        return latest

    def _parts_with(
        self, post_id: str, record: Mapping[str, Any]
    ) -> Iterator[str | ValueDigest]:
        """Yield the accounts, the subreddit and the values that a post belongs to."""
        for account in self.accounts:
            if post_id.startswith(f"at://{account}/"):
                yield account
        if self.subreddits:
            subreddit = _subreddit(record.get("subreddit"))
            if subreddit in self.subreddits:
                yield subreddit
        if not self.values:
            return
        for name, value in _values_of(record):
            for value_digest in self.values:
                is_named = name == value_digest.column
                if not value_digest.column:
                    is_named = name in AUTHOR_FIELDS
                if is_named and value_digest.is_of(value):
                    yield value_digest

    def to_dict(self) -> dict[str, Any]:
        """Return the selection for the log."""
        return {
            "ids": list(self.ids),
            "accounts": list(self.accounts),
            "subreddits": list(self.subreddits),
            "runs": list(self.runs),
            "values": [value._asdict() for value in self.values],
        }


def make_selection(
    *,
    ids: tuple[str, ...] = (),
    authors: tuple[str, ...] = (),
    accounts: tuple[str, ...] = (),
    runs: tuple[str, ...] = (),
    subreddits: tuple[str, ...] = (),
    values: tuple[str, ...] = (),
) -> Selection:
    """Return the selection that a person asks for. values: texts such as customer=4711.

    An id that names an account is taken as one. Raises UserError.
    """
    post_ids: dict[str, None] = {}
    dids: dict[str, None] = {}
    for text in ids:
        account = account_of(text)
        if account is not None:
            dids[account] = None
            continue
        post_ids[_checked_id(text)] = None
    for text in accounts:
        account = account_of(text)
        if account is None:
            raise UserError(
                f"{printable(text)!r:.80} is not an account. Give a DID, such as "
                "did:plc:abc, or the address of its page with the DID."
            )
        dids[account] = None
    digests = [digest_of("", author) for author in authors]
    for text in values:
        column, equals, value = text.partition("=")
        if not equals or not column.strip():
            raise UserError(
                f"{printable(text)!r:.80} is not COLUMN=VALUE. Write for example customer=4711."
            )
        digests.append(digest_of(column, value))
    names = [_subreddit(name) for name in subreddits]
    if "" in names:
        raise UserError("A subreddit has no name. Give one, such as python.")
    return Selection(
        ids=tuple(post_ids),
        accounts=tuple(dids),
        subreddits=tuple(dict.fromkeys(names)),
        runs=tuple(dict.fromkeys(map(parse_run, runs))),
        values=tuple(digests),
    )


def _checked_id(text: str) -> str:
    post_id = text.encode("utf-8", "replace").decode().strip()
    # the address of a post can be longer than an id
    if not 1 <= len(post_id) <= MAX_VALUE:
        raise UserError(
            f"'{printable(post_id):.40}' is not a post id or address: it has {len(post_id):,} "
            f"characters, not 1 to {MAX_VALUE:,}."
        )
    if len(post_id) > MAX_ID and "/" not in post_id:
        raise UserError(
            f"'{printable(post_id):.40}' is not a post id: it has {len(post_id):,} characters, "
            f"not 1 to {MAX_ID}."
        )
    return post_id


def _subreddit(name: object) -> str:
    """Return a subreddit's name without differences in case."""
    text = str(name or "").strip().casefold()
    return _without_prefix(text, SUBREDDIT_PREFIXES)


def _values_of(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the normalized names and values of a record's fields, and of those in `extra`."""
    extra = _object(record.get("extra"))
    for part in (record, extra):
        for name, value in part.items():
            key = normalize_key(str(name))
            for text in _texts_of(value):
                yield key, text


def _texts_of(value: object) -> Iterator[object]:
    """Yield what may be the name in a value: of an object, some of its fields."""
    if isinstance(value, dict):
        for name_field in NAME_FIELDS:
            if name_field in value:
                yield value[name_field]
    elif isinstance(value, str | int | float):
        yield _plain(value)


def _object(value: object) -> Mapping[str, Any]:
    """Return the object that a value is, or is the JSON of; an empty one for anything else."""
    if isinstance(value, str) and value.startswith("{"):
        value = _from_json(value)
    if isinstance(value, dict):
        return value
    return {}


def _plain(value: object) -> object:
    """Return the text in a value, which some exports quote as JSON."""
    if isinstance(value, str) and value.startswith('"'):
        return _from_json(value)
    return value


def _from_json(text: str) -> Any:
    """Parse JSON; the text itself if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_selection(value: Any) -> Selection:
    """Return the selection that the log holds. Raises ValueError if it is damaged."""
    if not isinstance(value, dict):
        raise ValueError("not a selection")
    texts: dict[str, tuple[str, ...]] = {}
    for name in ("ids", "accounts", "subreddits", "runs"):
        items = value.get(name, [])
        if not are_texts(items):
            raise ValueError(f"{name} must be a list of texts")
        texts[name] = tuple(items)
    digests = []
    for item in value.get("values", []):
        digest = _parse_digest(item)
        digests.append(digest)
    return Selection(
        ids=texts["ids"],
        accounts=texts["accounts"],
        subreddits=texts["subreddits"],
        runs=texts["runs"],
        values=tuple(digests),
    )


def _parse_digest(item: Any) -> ValueDigest:
    """Return a digest that the log holds. Raises ValueError if it is damaged."""
    names = set(ValueDigest._fields)
    if not isinstance(item, dict) or item.keys() != names:
        raise ValueError("a value must have column, salt and digest")
    parts = list(item.values())
    if not are_texts(parts):
        raise ValueError("column, salt and digest must be texts")
    digest = ValueDigest(**item)
    digest.is_of("")  # a salt that is not hexadecimal
    return digest


def are_texts(items: Any) -> bool:
    """Return whether a value is a list of texts."""
    if not isinstance(items, list):
        return False
    return all(isinstance(item, str) for item in items)
