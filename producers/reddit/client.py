"""Reddit through PRAW: pages of posts, posts by their ids, subreddits by their names. The only file that knows PRAW.

PRAW alone is not enough for a daemon: its timeouts have no effect, it sleeps where nobody can end the wait, strange
headers make it raise ValueError, and an answer of any size is read. So every answer passes through `Requestor`, which
has real time limits and a size limit, asks our own budget first, and hides from PRAW what makes it wait or fail; and
whatever still goes wrong comes out of `Reddit` as one of the faults of `things.py`.
"""

import configparser
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import Any

import praw
import prawcore
import requests
from praw.exceptions import MissingRequiredAttributeException
from praw.models import Submission, Subreddit
from praw.models.listing.listing import Listing
from prawcore.const import ACCESS_TOKEN_PATH
from requests.exceptions import ConnectionError as ConnectionFault
from requests.exceptions import ConnectTimeout, ProxyError, SSLError
from requests.structures import CaseInsensitiveDict
from urllib3.exceptions import HTTPError, NewConnectionError

from producers.records import BadRecord, post_of
from producers.reddit.budget import Budget, number
from producers.reddit.things import (
    PAGE,
    About,
    CredentialsRefused,
    Fault,
    Item,
    Outage,
    Page,
    RedditFault,
    TooMany,
    Unreachable,
    Unreadable,
    Why,
)
from shared.errors import CredentialsError, UserError
from shared.messages import GONE, Post
from shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: Bytes of one answer, at most. A hundred posts of the greatest length, escaped, are well below.
MAX_ANSWER = 64 * 2**20
#: Seconds to open a connection.
CONNECT_TIMEOUT = 5.0
#: An answer may take this many times `reddit_timeout` in all: it may come slowly, but not for ever.
WHOLE_ANSWER = 4
#: Statuses by which a server says that it cannot now.
UNABLE = frozenset({408, 500, 502, 503, 504, 520, 521, 522, 523, 524, 525})
#: Seconds since 1970 at the end of the year 9999.
LATEST = 253_402_300_799.0
#: Headers that PRAW may see. Reddit's budget is ours to keep to, and what PRAW makes of odd values is an exception.
KEPT_HEADERS = ("content-type", "location", "www-authenticate")


class Requestor(prawcore.Requestor):
    """prawcore's, with time limits, a size limit and our budget. Raises our faults, which prawcore lets pass."""

    def __init__(self, *, budget: Budget, timeout: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._budget = budget
        self._timeout = timeout

    def request(self, *args: Any, timeout: float | None = None, **arguments: Any) -> requests.Response:  # noqa: ARG002
        """One request: its method, its address, and requests' arguments. prawcore's own time limit does not count."""
        method, url = args
        if url.endswith(ACCESS_TOKEN_PATH):
            # All that is asked for is to read.
            arguments["data"] = [*arguments.get("data", ()), ("scope", "read")]
        self._budget.take()
        arguments |= {"timeout": (CONNECT_TIMEOUT, self._timeout), "stream": True}
        try:
            with self._http.request(method, url, **arguments) as response:
                self._budget.learn(response.headers)
                body = self._body(response)
        except requests.RequestException as error:
            raise _connection_fault(error) from error
        except HTTPError as error:  # in the midst of the answer
            raise Fault(f"the connection failed ({type(error).__name__})") from error
        return _checked(response, body)

    def _body(self, response: requests.Response) -> bytes:
        body = bytearray()
        deadline = time.monotonic() + WHOLE_ANSWER * self._timeout
        # Whatever has come, not a whole part: else one that comes a byte at a time is waited for.
        while part := response.raw.read1(2**16, decode_content=True):
            body += part
            if len(body) > MAX_ANSWER:
                raise Fault(f"the answer is longer than {MAX_ANSWER >> 20} MiB")
            if time.monotonic() > deadline:
                raise Fault("the answer does not end")
        return bytes(body)


def _connection_fault(error: requests.RequestException) -> RedditFault:
    """Whether there is no way to Reddit, or one connection failed."""
    causes = [error, *error.args, *(getattr(argument, "reason", None) for argument in error.args)]
    nowhere = ConnectTimeout | SSLError | ProxyError | NewConnectionError
    if isinstance(error, ConnectionFault) and any(isinstance(cause, nowhere) for cause in causes):
        return Unreachable(f"no connection to Reddit ({type(error).__name__})")
    return Fault(f"the connection failed ({type(error).__name__})")


def _checked(response: requests.Response, body: bytes) -> requests.Response:
    """The answer as PRAW may see it. Raises Fault for those that PRAW would wait for, or would fail on."""
    status = response.status_code
    if status == 429:
        raise TooMany(_retry_after(response.headers))
    if status in UNABLE:
        raise Fault(f"Reddit answered {status}")
    if status in (301, 302) and "location" not in response.headers:
        raise Fault(f"Reddit answered {status} without saying where to")
    answer = requests.Response()
    answer.status_code = status
    answer.url = response.url
    answer.request = response.request
    answer.encoding = response.encoding
    answer.headers = CaseInsensitiveDict(
        {name: value for name, value in response.headers.items() if name.lower() in KEPT_HEADERS}
    )
    answer.raw = BytesIO(body)
    return answer


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, which may also be given as a date: by the clock of whoever answers. None for anything else."""
    text = headers.get("retry-after", "")
    if (seconds := number(text)) is not None:
        return seconds
    try:
        then, now = (parsedate_to_datetime(value).timestamp() for value in (text, headers.get("date", "")))
    except (ValueError, OverflowError):
        return None
    return max(0.0, then - now)


class Reddit:
    """What the daemon asks of Reddit. For one thread. Every method raises RedditFault alone.

    topic_of: the topic of a subreddit, by its name in lower case.
    """

    def __init__(
        self,
        settings: Settings,
        budget: Budget,
        topic_of: Mapping[str, str],
        session: requests.Session | None = None,
    ) -> None:
        """Raises CredentialsError where they are missing; whether Reddit takes them shows with the first request."""
        self._session = session or requests.Session()
        self._reddit = _praw(settings, budget, self._session)
        self._topic_of = topic_of

    def close(self) -> None:
        self._session.close()

    def page(
        self, names: Sequence[str], listing: str = "new", after: str | None = None, limit: int = PAGE, period: str = ""
    ) -> Page:
        """Up to `limit` posts of these subreddits' joint listing; a few more where some are pinned.

        listing: new, hot, rising or top; period: hour, day, week, month, year or all, for top.
        """
        given: dict[str, str | int | None] = {"limit": limit, "after": after, "t": period or None}
        with _faults():
            answer = self._reddit.get(
                f"r/{'+'.join(names)}/{listing}",
                params={name: value for name, value in given.items() if value is not None},
            )
            return Page(list(self._items(answer)), answer.after)

    def info(self, fullnames: Iterable[str]) -> dict[str, Item]:
        """Posts by their fullnames, a hundred a request. Those that Reddit does not give are absent."""
        with _faults():
            return {item.fullname: item for item in self._items(self._reddit.info(fullnames=fullnames))}

    def about(self, names: Iterable[str]) -> dict[str, About]:
        """Subreddits by their names in lower case, a hundred a request. Missing and banned ones are absent."""
        with _faults():
            found = [vars(thing) for thing in self._reddit.info(subreddits=names) if isinstance(thing, Subreddit)]
        return {about["display_name"].lower(): About(about["display_name"], _why_not(about)) for about in found}

    def _items(self, things: Iterable[Any]) -> Iterator[Item]:
        if not isinstance(things, Listing | Iterator):
            raise Fault("Reddit answered with something else than a listing")
        for thing in things:
            if isinstance(thing, Submission):
                # Not by attributes: PRAW would make a request for each that is not there.
                said = vars(thing)
                try:
                    yield self._item(said)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    # One that is broken must not cost the others of its page.
                    logger.warning("a post that cannot be read (%s %.40r) is left out", error, said.get("name"))

    def _item(self, said: Mapping[str, Any]) -> Item:
        fullname = said.get("name") or f"t3_{said['id']}"
        if not re.fullmatch(r"t3_[0-9a-z]{1,20}", fullname):
            raise ValueError("no fullname")
        created = float(said["created_utc"])
        if not 0 <= created < LATEST:
            raise ValueError("no time")
        subreddit = str(said["subreddit"])
        body = said.get("selftext") or ""
        gone = bool(said.get("removed_by_category")) or body.strip() in GONE
        fields = {
            "id": fullname,
            "topic": self._topic_of.get(subreddit.lower()),
            "title": said.get("title"),
            "body": body,
            "subreddit": subreddit,
            "score": said.get("score"),
            "url": said.get("url"),
            "permalink": f"https://www.reddit.com{said['permalink']}" if said.get("permalink") else None,
            "created_utc": created,
            # False, or when; True of posts of Reddit's first years.
            "edited_utc": said["edited"] if type(said.get("edited")) in (int, float) else None,
            "stickied": bool(said.get("stickied")),
            "nsfw": bool(said.get("over_18")),
            "spoiler": bool(said.get("spoiler")),
        }
        # Its text is what counts: a post is not refused for its score, or for an address.
        *_, read = post_of(fields, fullname)
        post = read if isinstance(read, Post) else None
        score = said.get("score")
        return Item(
            fullname,
            subreddit,
            created,
            bool(said.get("stickied")),
            gone,
            score if isinstance(score, int) else 0,
            post,
            read.reason if isinstance(read, BadRecord) else "",
        )


def _why_not(about: Mapping[str, Any]) -> Why | None:
    if about.get("quarantine"):
        return "quarantined"
    return None if about.get("subreddit_type") in ("public", "restricted", "archived", "gold_restricted") else "private"


@contextmanager
def _faults() -> Iterator[None]:
    """Turns what PRAW, prawcore and odd answers raise into our faults."""
    try:
        yield
    except RedditFault:
        raise
    except prawcore.exceptions.Redirect as error:
        # A subreddit that is not there is answered with a search for its name.
        if "search" in error.path:
            raise Unreadable("missing") from error
        raise Fault(f"Reddit sends elsewhere ({error.path:.80})") from error
    except (prawcore.exceptions.Forbidden, prawcore.exceptions.NotFound) as error:
        raise _unreadable(error) from error
    except prawcore.exceptions.BadJSON as error:
        raise Fault("Reddit answered something that is no JSON") from error
    except prawcore.exceptions.OAuthException as error:
        raise CredentialsRefused(error.error) from error
    except prawcore.exceptions.ResponseException as error:
        if error.response.url.endswith(ACCESS_TOKEN_PATH) and error.response.status_code in (400, 401, 403):
            raise CredentialsRefused(f"answered {error.response.status_code}") from error
        raise Fault(f"Reddit answered {error.response.status_code}") from error
    except Exception as error:
        # PRAW fails in ways of its own on answers that it does not expect: KeyError, AttributeError, ValueError.
        logger.debug("PRAW failed on an answer", exc_info=True)
        raise Fault(f"an answer that cannot be read ({type(error).__name__})") from error


def _unreadable(error: prawcore.exceptions.ResponseException) -> Fault:
    """403 and 404 are Reddit's word on a subreddit where they are JSON; else somebody on the way said so."""
    status = error.response.status_code
    try:
        said = error.response.json()
    except ValueError:
        return Fault(f"answered {status}, and not by Reddit itself")
    if not isinstance(said, dict):
        return Fault(f"Reddit answered {status}")
    reason = str(said.get("reason") or "")
    if status == 404:
        return Unreadable("banned" if reason == "banned" else "missing")
    reasons: dict[str, Why] = {"quarantined": "quarantined", "gated": "gated", "banned": "banned"}
    return Unreadable(reasons.get(reason, "private"))


def _praw(settings: Settings, budget: Budget, session: requests.Session) -> praw.Reddit:
    """PRAW's client, set up to do nothing but read."""
    secrets = {"client_id": settings.reddit_client_id, "client_secret": settings.reddit_client_secret}
    own: dict[str, Any] = {name: value.get_secret_value() for name, value in secrets.items() if value}
    if settings.reddit_user_agent:
        own["user_agent"] = settings.reddit_user_agent
    try:
        reddit = praw.Reddit(
            settings.reddit_site,
            requestor_class=Requestor,
            requestor_kwargs={"budget": budget, "timeout": settings.reddit_timeout, "session": session},
            # Always given: a praw.ini that lies in the working directory must not send the credentials elsewhere.
            reddit_url=settings.reddit_url or "https://www.reddit.com",
            oauth_url=settings.reddit_url or "https://oauth.reddit.com",
            check_for_updates=False,
            check_for_async=False,
            **own,
        )
    except MissingRequiredAttributeException as error:
        found = re.search(r"'(\w+)'", str(error))
        raise CredentialsError(missing_credentials(found[1] if found else "client_id")) from None
    except configparser.NoSectionError:
        raise CredentialsError(
            f"praw.ini has no section [{settings.reddit_site}]. Name one that it has with {PREFIX}REDDIT_SITE."
        ) from None
    except (configparser.Error, ValueError) as error:
        raise CredentialsError(f"praw.ini cannot be read: {str(error).splitlines()[0]}") from None
    reddit.read_only = True  # whatever account a praw.ini may name
    return reddit


def missing_credentials(name: str) -> str:
    """What to do about credentials that are not there."""
    if name == "user_agent":
        return (
            f"Reddit wants to know who asks: set {PREFIX}REDDIT_USER_AGENT to "
            "<platform>:<app ID>:<version> (by /u/<user>), such as linux:my-feed:1.0 (by /u/somebody)."
        )
    return (
        f"Reddit's {name.replace('_', ' ')} is missing. Register an app of the type script at "
        f"https://www.reddit.com/prefs/apps (Reddit has to approve it) and set {PREFIX}REDDIT_CLIENT_ID and "
        f"{PREFIX}REDDIT_CLIENT_SECRET, or write client_id and client_secret into praw.ini. Without an app, "
        "`feedmill enqueue` reads dumps."
    )


@contextmanager
def told_plainly(settings: Settings) -> Iterator[None]:
    """Turns a Reddit that gives us nothing into UserError, a sentence for people."""
    try:
        yield
    except CredentialsRefused as fault:
        raise CredentialsError(refused_credentials(settings)) from fault
    except Outage as fault:
        where = settings.reddit_url or "Reddit"
        raise UserError(f"{where} gives no posts now: {fault}. What was sent is sent; run it again later.") from fault


def refused_credentials(settings: Settings) -> str:
    """What to do about credentials that Reddit does not take."""
    where = settings.reddit_url or "Reddit"
    return (
        f"{where} refuses the client id or its secret. Compare {PREFIX}REDDIT_CLIENT_ID and "
        f"{PREFIX}REDDIT_CLIENT_SECRET (or praw.ini) with your app at https://www.reddit.com/prefs/apps."
    )
