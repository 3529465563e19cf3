"""Reddit's API with PRAW's settings: pages of posts, and posts by id.

Only this module uses PRAW. PRAW's own requests do not suit a daemon: they ignore timeouts, sleep
without a way to interrupt them, raise ValueError on odd headers, read responses of any size, and
fail a whole page for one field that is null. So PRAW supplies the credentials, and `HttpClient`
sends all requests.
"""

import configparser
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import praw
import requests
from praw.exceptions import MissingRequiredAttributeException

from feedmill.producers.live.http import HttpClient, parse_json
from feedmill.producers.live.source import RequestBudget, RequestFailed, SourceFailed
from feedmill.producers.reddit.listing import (
    PAGE_SIZE,
    ListingItem,
    ListingPage,
    SubredditUnreadable,
    parse_items,
)
from feedmill.shared.errors import CredentialsError
from feedmill.shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: Reddit's addresses. Not PRAW's: a praw.ini in the working directory could redirect the
#: credentials.
API_URL = "https://oauth.reddit.com"
TOKEN_URL = "https://www.reddit.com"  # noqa: S105 - not a secret
#: Maximum requests per minute. The budget in Reddit's responses applies if it is lower.
REQUESTS_PER_MINUTE = 90
#: Items fetched to find a subreddit's newest post; more than can be pinned.
NEWEST_PAGE_SIZE = 5
#: The path to which Reddit redirects requests for a missing subreddit, and that of a subreddit's
#: pages.
SEARCH_PATH = re.compile(r"(https?://[^/]*)?(/subreddits)?/search(\.json)?/?(\?.*)?")
SUBREDDIT_PATH = re.compile(r"(?:https?://[^/]*)?/r/([^/?]+)([/?].*)?")
#: Reasons in answers with status 403 or 404.
CLOSED = frozenset({"quarantined", "gated", "banned"})

_BLOCKED = (
    f"Reddit or a proxy blocked the request with status {{}}; check "
    f"{PREFIX}REDDIT_USER_AGENT"
)


class RedditClient(HttpClient):
    """A client for Reddit's API. Not thread-safe.

    Methods raise SourceFailed, and RequestFailed for single requests.

    topic_of: topic by the subreddit's name in lower case.
    """

    def __init__(
        self, settings: Settings, budget: RequestBudget, topic_of: Mapping[str, str]
    ) -> None:
        """Create the client.

        Raises CredentialsError if credentials are missing; wrong ones fail the first request.
        """
        self._rejection = (
            f"Reddit rejected the client ID or secret. Compare {PREFIX}REDDIT_CLIENT_ID and "
            f"{PREFIX}REDDIT_CLIENT_SECRET (or praw.ini) with your app at "
            "https://www.reddit.com/prefs/apps."
        )
        config = _praw_config(settings)
        super().__init__("Reddit", budget)
        #: Addresses of the API and of the server that issues tokens.
        url = settings.reddit_url or API_URL
        token_url = settings.reddit_url or TOKEN_URL
        self._url = url.rstrip("/")
        self._token_url = token_url.rstrip("/")
        self.session.headers["User-Agent"] = config.user_agent
        self._credentials = (config.client_id, config.client_secret or "")
        if not "".join([config.user_agent, *self._credentials]).isascii():
            raise CredentialsError(
                "Reddit's client ID, client secret and user agent must be ASCII text: replace "
                "placeholders such as …."
            )
        self._token = ""
        self._was_accepted = False
        self._topic_of = topic_of

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
        joint_name = "+".join(names)
        params = {"limit": limit, "after": after, "t": period or None}
        data = self._listing(f"/r/{joint_name}/{listing}", params, names)
        next_anchor = data.get("after")
        if not isinstance(next_anchor, str):
            next_anchor = None
        return ListingPage(items=self._items(data), after=next_anchor)

    def newest(self, name: str) -> list[ListingItem]:
        """Return some of a subreddit's posts, the newest one included."""
        return self.page([name], limit=NEWEST_PAGE_SIZE).items

    def info(self, fullnames: Sequence[str]) -> dict[str, ListingItem]:
        """Return up to a hundred posts by fullname.

        Posts that Reddit does not return are absent.
        """
        listing = self._listing("/api/info", {"id": ",".join(fullnames)})
        return {item.fullname: item for item in self._items(listing)}

    def _items(self, listing: Mapping[str, Any]) -> list[ListingItem]:
        """Return a listing's posts."""
        posts = []
        for child in listing["children"]:
            data = child.get("data") if isinstance(child, dict) else None
            if not isinstance(data, dict):
                logger.warning("skipped an item of a listing that is not an object")
            elif child.get("kind") == "t3":
                posts.append(data)
        return list(parse_items(posts, self._topic_of))

    def _listing(
        self, path: str, params: Mapping[str, object], names: Collection[str] = ()
    ) -> Mapping[str, Any]:
        """Return the data of a listing. names: the subreddits requested."""
        response = self._get(path, params)
        if response.status_code == 401:
            self._token = ""  # expired
            response = self._get(path, params)
        _check(response, names)
        answer = self.json(response)
        if isinstance(answer, dict) and answer.get("kind") == "Listing":
            data = answer.get("data")
        else:
            data = None
        if not isinstance(data, dict) or not isinstance(data.get("children"), list):
            raise RequestFailed("Reddit returned something other than a listing")
        return data

    def _get(self, path: str, params: Mapping[str, object]) -> requests.Response:
        if not self._token:
            self._token = self._new_token()
        headers = {"Authorization": f"bearer {self._token}"}
        return self.request(
            "GET",
            self._url + path,
            params={**params, "raw_json": 1},
            headers=headers,
        )

    def _new_token(self) -> str:
        response = self.request(
            "POST",
            f"{self._token_url}/api/v1/access_token",
            auth=self._credentials,
            data={"grant_type": "client_credentials", "scope": "read"},
        )
        if response.status_code == 403 and "json" not in response.headers.get(
            "content-type", ""
        ):
            raise RequestFailed(_BLOCKED.format(response.status_code))
        if response.status_code in (400, 401, 403):
            if self._was_accepted:  # after a first token, Reddit may be wrong
                raise SourceFailed(self._rejection)
            raise CredentialsError(self._rejection)
        answer = self.json(response)
        token = None
        if response.status_code == 200 and isinstance(answer, dict):
            token = answer.get("access_token")
        if not token:
            raise RequestFailed(
                f"Reddit returned no token, but status {response.status_code}"
            )
        self._was_accepted = True
        return str(token)


def _check(response: requests.Response, names: Collection[str]) -> None:
    """Raise RequestFailed unless the status is 200. names: the subreddits requested."""
    status = response.status_code
    if status in (301, 302, 307, 308):
        location = response.headers.get("location", "")
        # Reddit redirects requests for a missing subreddit to a search for its name.
        if SEARCH_PATH.fullmatch(location):
            raise SubredditUnreadable("missing")
        target = SUBREDDIT_PATH.fullmatch(location)
        requested = {name.lower() for name in names}
        if target and requested and target[1].lower() not in requested:
            raise SubredditUnreadable("redirected")
    if status in (403, 404):
        # Reddit's own come as JSON and describe the subreddit; others come from a proxy.
        try:
            reason = str(parse_json(response.content).get("reason"))
        except (ValueError, AttributeError):
            raise RequestFailed(_BLOCKED.format(status)) from None
        if reason not in CLOSED:
            reason = "private" if status == 403 else "missing"
        raise SubredditUnreadable(reason)
    if status != 200:
        raise RequestFailed(f"Reddit returned status {status}")


def _praw_config(settings: Settings) -> Any:
    """Return PRAW's configuration: from our settings, its environment variables or praw.ini."""
    secrets = {
        "client_id": settings.reddit_client_id,
        "client_secret": settings.reddit_client_secret,
    }
    overrides: dict[str, Any] = {}
    for name, value in secrets.items():
        if value:
            overrides[name] = value.get_secret_value()
    if settings.reddit_user_agent:
        overrides["user_agent"] = settings.reddit_user_agent
    try:
        reddit = praw.Reddit(
            check_for_updates=False,
            check_for_async=False,
            **overrides,
        )
    except MissingRequiredAttributeException as error:
        quoted = re.search(r"'(\w+)'", str(error))
        attribute = quoted[1] if quoted else "client_id"
        name = attribute.replace("_", " ")
        raise CredentialsError(
            f"Reddit's {name} is missing. Register a script app at "
            "https://www.reddit.com/prefs/apps (Reddit must approve it), and set "
            f"{PREFIX}REDDIT_CLIENT_ID, {PREFIX}REDDIT_CLIENT_SECRET and "
            f"{PREFIX}REDDIT_USER_AGENT, such as linux:my-feed:1.0 (by /u/somebody), or praw.ini; "
            "without an app, use --source arctic-shift."
        ) from None
    except (configparser.Error, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise CredentialsError(
            f"Cannot read praw.ini: {first_line}. Correct it, or praw_site."
        ) from None
    return reddit.config
