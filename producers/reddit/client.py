"""Reddit's API through PRAW: pages of posts, posts by id, subreddits by name. Only this module uses PRAW.

PRAW alone does not suit a daemon: it ignores timeouts, sleeps without a way to interrupt it, raises ValueError on odd
headers and reads responses of any size. `Requestor` therefore handles every response: it enforces timeouts, a size
limit and the request budget, and hides headers and statuses that make PRAW wait or fail. All remaining errors leave
`RedditClient` as the exceptions in `listing.py`.
"""

import configparser
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import islice
from typing import Any

import praw
import prawcore
import requests
from praw.exceptions import MissingRequiredAttributeException
from prawcore.const import ACCESS_TOKEN_PATH
from requests.structures import CaseInsensitiveDict

from feedmill.producers.live.budget import RequestBudget
from feedmill.producers.reddit.http import TEMPORARY_STATUSES, fetch, retry_after
from feedmill.producers.reddit.items import parse_items
from feedmill.producers.reddit.listing import (
    PAGE_SIZE,
    CredentialsRefused,
    ListingItem,
    ListingPage,
    Outage,
    RedditFault,
    RequestFailed,
    SubredditInfo,
    SubredditUnreadable,
    TooManyRequests,
    UnreadableReason,
)
from feedmill.shared.errors import CredentialsError, UserError
from feedmill.shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: The path to which Reddit redirects requests for a missing subreddit, and that of a subreddit's pages.
SEARCH_PATH, SUBREDDIT_PATH = re.compile(r"(/subreddits)?/search(\.json)?/?"), re.compile(r"/r/([^/]+)(/.*)?")
#: Headers passed on to PRAW. Rate-limit headers are not: `RequestBudget` handles them, and odd values make PRAW raise.
PASSED_HEADERS = ("content-type", "location", "www-authenticate")


_BLOCKED = f"Reddit or a proxy blocked the request with status {{}}; check {PREFIX}REDDIT_USER_AGENT"


class Requestor(prawcore.Requestor):
    """A requestor with timeouts, a size limit and the request budget. Raises RedditFault, uncaught by prawcore."""

    def __init__(self, *, budget: RequestBudget, timeout: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._budget = budget
        self._timeout = timeout

    def request(self, *args: Any, timeout: float | None = None, **arguments: Any) -> requests.Response:  # noqa: ARG002
        """Send a request. args: method and URL; arguments: for requests. prawcore's `timeout` is ignored."""
        method, url = args
        if url.endswith(ACCESS_TOKEN_PATH):
            # Request read access only.
            arguments["data"] = [*arguments.get("data", ()), ("scope", "read")]
        return _checked(*fetch(self._http, self._budget, self._timeout, method, url, **arguments))


def _checked(response: requests.Response, body: bytes) -> requests.Response:
    """Return a copy of the response for PRAW. Raises RedditFault for statuses on which PRAW would wait or fail."""
    status = response.status_code
    if status == 429:
        raise TooManyRequests(retry_after(response.headers))
    if status in TEMPORARY_STATUSES:
        raise RequestFailed(f"Reddit returned status {status}")
    if status in (301, 302) and "location" not in response.headers:
        raise RequestFailed(f"Reddit returned status {status} without a location")
    answer = requests.Response()
    answer.status_code = status
    answer.url = response.url
    answer.request = response.request
    answer.encoding = response.encoding
    answer.headers = CaseInsensitiveDict(
        {name: value for name, value in response.headers.items() if name.lower() in PASSED_HEADERS}
    )
    answer.raw = BytesIO(body)
    return answer


class RedditClient:
    """A client for Reddit's API. Not thread-safe. Every method raises only RedditFault.

    topic_of: topic by the subreddit's name in lower case.
    """

    name = "Reddit"

    def __init__(
        self,
        settings: Settings,
        budget: RequestBudget,
        topic_of: Mapping[str, str],
        session: requests.Session | None = None,
    ) -> None:
        """Create the client. Raises CredentialsError if credentials are missing; wrong ones fail the first request."""
        self.refused = refused_credentials(settings)
        self._session = session or requests.Session()
        self._reddit = _praw(settings, budget, self._session)
        self._topic_of = topic_of

    def close(self) -> None:
        self._session.close()

    def page(
        self,
        names: Sequence[str],
        listing: str = "new",
        after: str | None = None,
        limit: int = PAGE_SIZE,
        period: str = "",
    ) -> ListingPage:
        """Return up to `limit` posts of the subreddits' joint listing, plus pinned ones.

        listing: new, hot, rising or top. period, for top: hour, day, week, month, year or all.
        """
        given: dict[str, str | int | None] = {"limit": limit, "after": after, "t": period or None}
        params = {name: value for name, value in given.items() if value is not None}
        data = self._listing(f"r/{'+'.join(names)}/{listing}", params, names)
        after = data.get("after")
        return ListingPage(list(self._items(data)), after if isinstance(after, str) else None)

    def info(self, fullnames: Iterable[str]) -> dict[str, ListingItem]:
        """Return posts by fullname, a hundred per request. Posts that Reddit does not return are absent."""
        return {item.fullname: item for data in self._info("id", fullnames) for item in self._items(data)}

    def about(self, names: Iterable[str]) -> dict[str, SubredditInfo]:
        """Return subreddits by name in lower case, a hundred per request. Missing and banned ones are absent."""
        found = [about for data in self._info("sr_name", names) for about in _children(data, "t5")]
        return {
            name.lower(): SubredditInfo(name, _unreadable_reason(about))
            for about in found
            if isinstance(name := about.get("display_name"), str)
        }

    def _info(self, parameter: str, values: Iterable[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the listings of posts or subreddits, a hundred per request."""
        remaining = iter(values)
        while batch := list(islice(remaining, PAGE_SIZE)):
            yield self._listing("api/info", {parameter: ",".join(batch)})

    def _listing(self, path: str, params: Mapping[str, str | int], names: Collection[str] = ()) -> Mapping[str, Any]:
        """Return the data of a listing. names: the subreddits requested.

        Reads the JSON itself: PRAW's objects fail a whole page for one field that is null.
        """
        with _fault_conversion(names):
            answer = self._reddit.request(method="GET", path=path, params=dict(params))
        data = answer.get("data") if isinstance(answer, dict) and answer.get("kind") == "Listing" else None
        if not isinstance(data, dict) or not isinstance(data.get("children"), list):
            raise RequestFailed("Reddit returned something other than a listing")
        return data

    def _items(self, listing: Mapping[str, Any]) -> Iterator[ListingItem]:
        return parse_items(_children(listing, "t3"), self._topic_of)


def _children(listing: Mapping[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the data of a listing's items of this kind."""
    for child in listing["children"]:
        data = child.get("data") if isinstance(child, dict) else None
        if not isinstance(data, dict):
            logger.warning("skipped an item of a listing that is not an object")
        elif child.get("kind") == kind:
            yield data


def _unreadable_reason(about: Mapping[str, Any]) -> UnreadableReason | None:
    if about.get("quarantine"):
        return "quarantined"
    return (
        None
        if about.get("subreddit_type") in ("public", "restricted", "archived", "gold_restricted", "user")
        else "private"
    )


@contextmanager
def _fault_conversion(names: Collection[str]) -> Iterator[None]:
    """Convert exceptions of PRAW and prawcore, and those caused by unexpected responses, to RedditFault.

    names: the subreddits requested.
    """
    try:
        yield
    except RedditFault:
        raise
    except prawcore.exceptions.Redirect as error:
        # Reddit redirects requests for a missing subreddit to a search for its name.
        if SEARCH_PATH.fullmatch(error.path):
            raise SubredditUnreadable("missing") from error
        target = SUBREDDIT_PATH.fullmatch(error.path)
        if target and names and target[1].lower() not in {name.lower() for name in names}:
            raise SubredditUnreadable("redirected") from error
        raise RequestFailed(f"Reddit redirected to {error.path:.80}") from error
    except (prawcore.exceptions.Forbidden, prawcore.exceptions.NotFound) as error:
        raise _forbidden_or_missing(error) from error
    except prawcore.exceptions.BadJSON as error:
        raise RequestFailed("Reddit returned invalid JSON") from error
    except prawcore.exceptions.OAuthException as error:
        raise CredentialsRefused(error.error) from error
    except prawcore.exceptions.ResponseException as error:
        if error.response.status_code == 403 and "json" not in error.response.headers.get("content-type", ""):
            raise RequestFailed(_BLOCKED.format(403)) from error
        if error.response.url.endswith(ACCESS_TOKEN_PATH) and error.response.status_code in (400, 401, 403):
            raise CredentialsRefused(f"status {error.response.status_code}") from error
        raise RequestFailed(f"Reddit returned status {error.response.status_code}") from error
    except Exception as error:
        # On unexpected responses PRAW raises KeyError, AttributeError, ValueError and others.
        logger.debug("PRAW failed on a response", exc_info=True)
        raise RequestFailed(f"Reddit returned an unexpected response ({type(error).__name__})") from error


def _forbidden_or_missing(error: prawcore.exceptions.ResponseException) -> RequestFailed:
    """Interpret a 403 or 404. Reddit's own come as JSON and describe the subreddit; others come from a proxy."""
    status = error.response.status_code
    try:
        details = error.response.json()
    except ValueError:
        return RequestFailed(_BLOCKED.format(status))
    if not isinstance(details, dict):
        return RequestFailed(f"Reddit returned status {status}")
    reason = str(details.get("reason") or "")
    if status == 404:
        return SubredditUnreadable("banned" if reason == "banned" else "missing")
    reasons: dict[str, UnreadableReason] = {"quarantined": "quarantined", "gated": "gated", "banned": "banned"}
    return SubredditUnreadable(reasons.get(reason, "private"))


def _praw(settings: Settings, budget: RequestBudget, session: requests.Session) -> praw.Reddit:
    """Create a read-only PRAW client."""
    secrets = {"client_id": settings.reddit_client_id, "client_secret": settings.reddit_client_secret}
    overrides: dict[str, Any] = {name: value.get_secret_value() for name, value in secrets.items() if value}
    if settings.reddit_user_agent:
        overrides["user_agent"] = settings.reddit_user_agent
    try:
        reddit = praw.Reddit(
            requestor_class=Requestor,
            requestor_kwargs={"budget": budget, "timeout": settings.reddit_timeout, "session": session},
            # Set explicitly, so that a praw.ini in the working directory cannot redirect the credentials.
            reddit_url=settings.reddit_url or "https://www.reddit.com",
            oauth_url=settings.reddit_url or "https://oauth.reddit.com",
            check_for_updates=False,
            check_for_async=False,
            **overrides,
        )
    except MissingRequiredAttributeException as error:
        found = re.search(r"'(\w+)'", str(error))
        raise CredentialsError(missing_credentials(found[1] if found else "client_id")) from None
    except configparser.NoSectionError as error:
        raise CredentialsError(f"praw.ini has no section [{error.section}]. Correct praw_site.") from None
    except (configparser.Error, ValueError) as error:
        raise CredentialsError(f"Cannot read praw.ini: {str(error).splitlines()[0]}. Correct the file.") from None
    reddit.read_only = True  # even if praw.ini contains an account
    return reddit


def missing_credentials(name: str) -> str:
    """Return the error message for missing credentials."""
    if name == "user_agent":
        return (
            f"Reddit requires a user agent. Set {PREFIX}REDDIT_USER_AGENT to "
            "<platform>:<app ID>:<version> (by /u/<user>), for example linux:my-feed:1.0 (by /u/somebody)."
        )
    return (
        f"Reddit's {name.replace('_', ' ')} is missing. Register a script app at https://www.reddit.com/prefs/apps "
        f"(Reddit must approve it) and set {PREFIX}REDDIT_CLIENT_ID and {PREFIX}REDDIT_CLIENT_SECRET, or client_id and "
        "client_secret in praw.ini; without an app, load a dump with `feedmill enqueue`."
    )


def outage_error(settings: Settings, fault: Outage) -> UserError:
    """Convert an outage of Reddit to an error for users."""
    if isinstance(fault, CredentialsRefused):
        return CredentialsError(refused_credentials(settings))
    where = settings.reddit_url or "Reddit"
    return UserError(
        f"{where} is unavailable: {fault}. Posts sent so far are in the queue; run the command again later."
    )


def refused_credentials(settings: Settings) -> str:
    """Return the error message for credentials that Reddit rejects."""
    where = settings.reddit_url or "Reddit"
    return (
        f"{where} rejected the client ID or secret. Compare {PREFIX}REDDIT_CLIENT_ID and "
        f"{PREFIX}REDDIT_CLIENT_SECRET (or praw.ini) with your app at https://www.reddit.com/prefs/apps."
    )
