"""Keep secrets of OpenTelemetry's variables out of logs: values of headers, and credentials in
addresses of collectors.

OpenTelemetry logs a malformed header in full, and HTTP clients log addresses of failed requests.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote

#: Stands for a secret in logs.
HIDDEN = "[hidden]"
#: Shorter texts are no secrets, and would make logs unreadable.
MIN_SECRET_CHARACTERS = 4
VARIABLE = re.compile(r"OTEL_\w*(HEADERS|ENDPOINT)")
SEPARATOR = re.compile(r"[=:\s]")
#: Words before the secret in a header's value.
SCHEMES = frozenset(["basic", "bearer"])


class Secrets:
    """The secrets in this process' environment."""

    def __init__(self) -> None:
        secrets = set[str]()
        for name, value in os.environ.items():
            kind = VARIABLE.fullmatch(name)
            if kind is None:
                continue
            parts = _in_headers(value)
            if kind[1] == "ENDPOINT":
                parts = _in_address(value)
            for part in parts:
                secrets.update(_forms(part.strip()))
        long_ones = [text for text in secrets if len(text) >= MIN_SECRET_CHARACTERS]
        # One may contain another.
        self._secrets = sorted(long_ones, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return a text without the secrets."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def _in_headers(value: str) -> Iterator[str]:
    """Yield the values of headers and their parts, also of malformed ones such as
    `api-key: SECRET`.
    """
    for text in (value, unquote(value)):
        for header in text.split(","):
            name, separator, content = _split(header.strip())
            if not separator:
                yield name
            while separator:
                yield content
                word, separator, content = _split(content)
                if word.lower() not in SCHEMES:
                    yield word


def _split(text: str) -> tuple[str, str, str]:
    """Return a text's part before its first separator, the separator, and the rest."""
    separator = SEPARATOR.search(text)
    if separator is None:
        return text, "", ""
    start = separator.start()
    end = separator.end()
    return text[:start], separator[0], text[end:]


def _in_address(value: str) -> Iterator[str]:
    """Yield the credentials before a host, and the query and its values."""
    address, _, query = value.partition("?")
    yield query
    for parameter in query.split("&"):
        yield parameter.partition("=")[2]
    before, separator, _ = address.rpartition("@")
    if not separator:
        return
    credentials = before.rpartition("//")[2]
    user, _, password = credentials.partition(":")
    yield credentials
    yield password or user


def _forms(secret: str) -> Iterable[str]:
    """Return a secret as it is, decoded, and encoded for an address."""
    return secret, unquote(secret), quote(secret), quote(secret, safe="")


class WithoutSecrets(logging.Filter):
    """Remove secrets from records, for loggers whose records the handlers of an application get.

    Feedmill's own handlers remove them by themselves (shared/logs.py).
    """

    def __init__(self) -> None:
        super().__init__()
        self._secrets = Secrets()
        self._formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        record.msg = self._secrets.hide(message)
        record.args = None
        if record.exc_info:
            traceback = self._formatter.formatException(record.exc_info)
            record.exc_text = self._secrets.hide(traceback)
            record.exc_info = None
        return True
