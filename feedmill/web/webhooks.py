"""Notices of finished runs, sent to addresses that the operator allows.

They wait in Redis, so that a restart loses none. A run is finished once each of its posts has a
result or a dead letter. Hosts that are not listed in FEEDMILL_WEB_WEBHOOK_HOSTS are refused, and
redirects are not followed: a caller could else make the server reach what only it can reach.
"""

import hashlib
import hmac
import http.client
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, Field, ValidationError
from redis import Redis
from redis.exceptions import RedisError, WatchError

from feedmill.shared import runs
from feedmill.shared.backoff import Backoff
from feedmill.shared.errors import UserError, printable
from feedmill.shared.keys import WEBHOOKS
from feedmill.shared.redis_errors import trouble
from feedmill.shared.settings import PREFIX, Settings

logger = logging.getLogger(__name__)

#: Most notices that wait, and most characters of an address.
MAX_WAITING = 1000
MAX_URL = 2000
#: Characters of an address: a request's line takes no others.
URL = re.compile(rf"[!-~]{{1,{MAX_URL}}}")
#: Seconds between two looks at the runs.
INTERVAL_S = 2.0
#: Attempts to send a notice, the pauses between them, and seconds for each: to connect, for each
#: part of the answer, and for the whole answer.
MAX_ATTEMPTS = 8
ATTEMPTS = Backoff(first_s=5.0, max_s=3600.0)
TIMEOUT_S = 10.0
#: Seconds after which a notice of a run that does not end is dropped.
MAX_AGE_S = 7 * 86_400.0
#: Seconds after which a notice of a run that does not exist is dropped: it is stored before the
#: run's first post.
UNKNOWN_AGE_S = 60.0
#: Header of the signature: HMAC-SHA256 of the time in X-Feedmill-Time, a dot, and the body.
SIGNATURE = "X-Feedmill-Signature"
SENT_AT = "X-Feedmill-Time"


class Notice(BaseModel):
    """A notice that waits, as Redis stores it: its address, when it came, how often and when it is
    to be sent next. Times are seconds since 1970.
    """

    url: str
    since: Annotated[float, Field(allow_inf_nan=False)]
    attempts: Annotated[int, Field(ge=0, le=MAX_ATTEMPTS)]
    due: Annotated[float, Field(allow_inf_nan=False)]


class Webhooks:
    """Keeps and sends the notices of one server. Its thread runs between `start` and `stop`.

    Several servers may share a Redis: each notice is taken by one of those with a secret.
    """

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = redis
        names = settings.web_webhook_hosts.lower().split(",")
        self._hosts = {name.strip() for name in names if name.strip()}
        secret = settings.web_webhook_secret
        self._secret = b"" if secret is None else secret.get_secret_value().encode()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name="webhooks",
            daemon=True,
        )

    def start(self) -> None:
        if self._secret:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._secret:
            self._thread.join(TIMEOUT_S)

    def add(self, run: str, url: str) -> None:
        """Send a notice to the address when the run has finished. A later address replaces it.

        Raises UserError for an address that is not allowed, RedisError.
        """
        self._check(url)
        if self._redis.hlen(WEBHOOKS) >= MAX_WAITING:
            raise UserError(
                "Too many runs wait for their notice. Ask for the run instead."
            )
        notice = Notice(
            url=url,
            since=time.time(),
            attempts=0,
            due=0.0,
        )
        self._redis.hset(WEBHOOKS, run, notice.model_dump_json())

    def _check(self, url: str) -> SplitResult:
        """Return a valid address' parts."""
        if not self._secret:
            raise UserError(
                f"{PREFIX}WEB_WEBHOOK_SECRET must be set to send notices: it signs them."
            )
        if not URL.fullmatch(url):
            raise UserError(
                f"webhook: the address has more than {MAX_URL:,} characters, or others than "
                "printable ones of ASCII. Encode them, as in %20."
            )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise UserError(f"webhook: this is no address ({error}).") from None
        host = parts.netloc.lower()
        if parts.scheme not in {"http", "https"} or host not in self._hosts:
            raise UserError(
                f"webhook: {printable(host) or 'the address'} is not an http(s) host in "
                f"{PREFIX}WEB_WEBHOOK_HOSTS, which names those that notices may go to."
            )
        return parts

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self._send_due()
            except RedisError as fault:
                logger.warning("webhooks: Redis %s. Retrying.", trouble(fault))
            except Exception:
                # The thread must live: all other notices wait for it.
                logger.exception("webhooks: a notice failed")

    def _send_due(self) -> None:
        """Send the notices of all runs that have finished."""
        waiting: Any = self._redis.hgetall(WEBHOOKS)
        for run, text in waiting.items():
            try:
                notice = Notice.model_validate_json(text)
            except ValidationError:
                logger.warning("run %s: its notice is damaged", printable(run))
                remove(self._redis, run, text)
                continue
            age_s = time.time() - notice.since
            progress = runs.progress(self._redis, run)
            max_age_s = UNKNOWN_AGE_S if progress is None else MAX_AGE_S
            if age_s > max_age_s:
                logger.warning("run %s: its notice is dropped", printable(run))
                remove(self._redis, run, text)
                continue
            is_due = notice.due <= time.time()
            if is_due and progress is not None and progress.pending == 0:
                self._take(run, text, notice, progress.to_dict())

    def _take(
        self,
        run: str,
        text: str,
        notice: Notice,
        progress: Mapping[str, Any],
    ) -> None:
        """Send one notice, unless another server does; plan the next attempt if it fails."""
        attempts = notice.attempts
        pause_s = ATTEMPTS.pause_s(attempts)
        update = {"attempts": attempts + 1, "due": time.time() + pause_s}
        planned = notice.model_copy(update=update).model_dump_json()
        if not replace(self._redis, run, text, planned):
            return
        try:
            self._send(notice.url, {"event": "run.finished", **progress})
        except (OSError, http.client.HTTPException, UserError) as error:
            logger.warning(
                "run %s: attempt %s of its notice failed: %s",
                printable(run),
                attempts + 1,
                printable(str(error)),
            )
            if attempts + 1 < MAX_ATTEMPTS:
                return
        # Sending takes seconds: another notice of this run may have come meanwhile.
        remove(self._redis, run, planned)

    def _send(self, url: str, content: Mapping[str, Any]) -> None:
        """Post the content. Raises OSError unless the answer's status is 2xx."""
        parts = self._check(url)
        body = json.dumps(content).encode()
        sent_at = f"{time.time():.0f}"
        signed = sent_at.encode() + b"." + body
        signature = hmac.new(self._secret, signed, hashlib.sha256).hexdigest()
        kind: Any = http.client.HTTPConnection
        if parts.scheme == "https":
            kind = http.client.HTTPSConnection
        connection = kind(parts.netloc, timeout=TIMEOUT_S)
        path = parts.path or "/"
        if parts.query:
            path = f"{path}?{parts.query}"
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "feedmill",
            SENT_AT: sent_at,
            SIGNATURE: f"sha256={signature}",
        }
        try:
            connection.connect()
            with _cut_off_after(TIMEOUT_S, connection):
                connection.request("POST", path, body, headers)
                status = connection.getresponse().status
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise OSError(f"the answer has the status {status}")


@contextmanager
def _cut_off_after(seconds: float, connection: Any) -> Iterator[None]:
    """End a connection after some seconds: a server that sends a byte from time to time would keep
    it for hours.
    """

    def cut_off() -> None:
        with suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def replace(redis: Redis, run: str, before: str, after: str) -> bool:
    """Replace a run's notice if nobody has done so; return whether it was."""
    pipeline: Any
    with redis.pipeline() as pipeline:
        pipeline.watch(WEBHOOKS)
        if pipeline.hget(WEBHOOKS, run) != before:
            return False
        pipeline.multi()
        pipeline.hset(WEBHOOKS, run, after)
        try:
            pipeline.execute()
        except WatchError:
            return False
    return True


def remove(redis: Redis, run: str, text: str) -> None:
    """Remove a run's notice, unless a later one has replaced it."""

    def remove_same(pipeline: Any) -> None:
        is_same = pipeline.hget(WEBHOOKS, run) == text
        pipeline.multi()
        if is_same:
            pipeline.hdel(WEBHOOKS, run)

    redis.transaction(remove_same, WEBHOOKS)
