"""The Celery application of a sender: its options as data, and as Python code to paste.

An application that is created without `set_as_current=False` becomes its process' current one. The
host's next `@shared_task` would then be sent to Feedmill's Redis, where no worker reads its queue.
"""

import json
import os
from typing import Any, NamedTuple

from feedmill.shared.settings import ALIASES, PREFIX, Settings

#: redis-py's word for verifying a server's certificate: text, so that it is also JSON.
VERIFIED = "required"


class _ConnectionOptions(NamedTuple):
    """Options of broker and result backend beyond an address."""

    #: Name of the variable in the code.
    variable: str
    #: Celery's settings that take the values.
    names: tuple[str, str]
    values: dict[str, Any]


def celery_options(settings: Settings) -> dict[str, Any]:
    """Return the configuration of an application that sends to this Redis, with its passwords.

    Its names are those of Celery's settings, and its values are JSON. Raises SettingsError.
    """
    url = settings.broker_url
    backend = url if settings.celery_results == "redis" else "rpc://"
    options: dict[str, Any] = {"broker_url": url, "result_backend": backend}
    connection = _connection_options(settings)
    if connection is None:
        return options
    values = connection.values
    password = settings.redis_sentinel_password
    if password is not None:
        secret = password.get_secret_value()
        values = values | {"sentinel_kwargs": {"password": secret}}
    return options | dict.fromkeys(connection.names, values)


def celery_code(settings: Settings) -> str:
    """Return Python code that creates the application `app`.

    It contains no password: it reads them from environment variables, as commands do. Raises
    SettingsError.
    """
    imports = ["import os"]
    url = f'os.environ["{PREFIX}REDIS_URL"]'
    address = os.environ.get(f"{PREFIX}REDIS_URL", "").strip()
    if address.startswith(tuple(ALIASES)):
        # kombu does not know Valkey's names of the schemes.
        imports.append("import re")
        url = f're.sub("^valkey", "redis", {url})'
    backend = "url" if settings.celery_results == "redis" else '"rpc://"'
    lines = [
        *imports,
        "",
        "from celery import Celery",
        "",
        f"url = {url}",
        f"app = Celery(broker=url, backend={backend}, set_as_current=False)",
        *_connection_code(settings),
    ]
    return "\n".join(lines) + "\n"


def _connection_code(settings: Settings) -> list[str]:
    connection = _connection_options(settings)
    if connection is None:
        return []
    variable = connection.variable
    broker, backend = connection.names
    # A text of JSON is one of Python, too.
    values = json.dumps(connection.values, ensure_ascii=False)
    lines = [f"{variable} = {values}"]
    if settings.redis_sentinel_password is not None:
        secret = f'os.environ["{PREFIX}REDIS_SENTINEL_PASSWORD"]'
        lines.append(f'{variable}["sentinel_kwargs"] = {{"password": {secret}}}')
    lines.append(f"app.conf.{broker} = {variable}")
    lines.append(f"app.conf.{backend} = {variable}")
    return lines


def _connection_options(settings: Settings) -> _ConnectionOptions | None:
    """Return the options of TLS, or those of Sentinels without their password; None for a plain
    address.
    """
    scheme = settings.redis.scheme
    if scheme == "rediss":
        files = {
            "ssl_ca_certs": settings.redis_ca_file,
            "ssl_certfile": settings.redis_certificate_file,
            "ssl_keyfile": settings.redis_key_file,
        }
        tls = {"ssl_cert_reqs": VERIFIED}
        for name, path in files.items():
            if path is not None:
                tls[name] = str(path)
        return _ConnectionOptions(
            "tls", ("broker_use_ssl", "redis_backend_use_ssl"), tls
        )
    if scheme == "sentinel":
        names = ("broker_transport_options", "result_backend_transport_options")
        master = {"master_name": settings.redis_master}
        return _ConnectionOptions("sentinels", names, master)
    return None
