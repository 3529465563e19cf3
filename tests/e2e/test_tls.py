"""rediss:// addresses: every connection verifies certificates, from the producer to the reader."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from feedmill.shared.broker import connect, make_app, publish
from feedmill.shared.errors import RedisUnavailable, SettingsError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.metrics import connect_for_monitoring
from feedmill.shared.redis_errors import user_errors
from feedmill.shared.settings import Settings, load
from feedmill.workers.transport.redis_transport import lease_options
from tests import support
from tests.support import RedisServer, feedmill, make_posts, wait_until, working

pytestmark = pytest.mark.system_redis


class SecureRedis(RedisServer):
    """A Redis with a TLS certificate.

    Redis can present only one, so each certificate needs its own process.
    """

    def __init__(
        self,
        folder: Path,
        certificate: tuple[Path, Path],
        authority: Path,
        clients: str = "no",
        users: str = "",
    ) -> None:
        self.tls_port = support.free_port()
        shown = (
            f"tls-cert-file {certificate[0]}\ntls-key-file {certificate[1]}\ntls-ca-cert-file "
            f"{authority}\n"
        )
        path = support.installed_redis()
        if path is None:
            pytest.skip("needs a redis-server with TLS: apt install redis-server")
        super().__init__(
            path,
            folder,
            (f"tls-port {self.tls_port}\ntls-auth-clients {clients}\n{shown}{users}"),
        )
        self.secure_url = f"rediss://:{support.PASSWORD}@127.0.0.1:{self.tls_port}/0"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> support.Authority:
    return support.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(
    authority: support.Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureRedis]:
    server = SecureRedis(
        tmp_path_factory.mktemp("redis"),
        authority.certificate("server"),
        authority.file,
    )
    yield server
    server.stop()


def plain_connections(server: RedisServer) -> int:
    """Count the plain-text connections other than the test's own."""
    return (
        sum(
            int(each["laddr"].rpartition(":")[2]) == server.port
            for each in server.client.client_list()
        )
        - 1
    )


def test_classifies_over_tls_only(
    secure: SecureRedis, authority: support.Authority, tmp_path: Path
) -> None:
    secure.client.flushall()
    way = {
        "FEEDMILL_REDIS_URL": secure.secure_url,
        "FEEDMILL_REDIS_CA_FILE": str(authority.file),
    }
    with working(secure, tmp_path, **way) as worker:
        sent = feedmill(
            "enqueue", "-", cwd=tmp_path, stdin=support.as_jsonl(make_posts(40)), **way
        )
        assert (sent.returncode, "Traceback" in sent.stderr) == (0, False), sent.stderr
        wait_until(
            lambda: secure.client.xlen("feedmill:results") == 40,
            "all results are stored",
        )
        found = feedmill("results", "--limit", "100", cwd=tmp_path, **way)
        assert len(found.stdout.splitlines()) == 40, found.stderr
        health = feedmill("health", cwd=tmp_path, **way)
        assert health.returncode == 0, health.stdout + health.stderr
        assert plain_connections(secure) == 0
        assert worker.end() == 0
    assert "Traceback" not in worker.text()


#: Sends a message with the application that `feedmill url --celery` printed.
SENDS = """
app.backend.client.ping()
app.send_task("feedmill.classify", kwargs={"posts": []}, queue="feedmill")
"""


def test_printed_application_verifies_the_server(
    secure: SecureRedis, authority: support.Authority, tmp_path: Path
) -> None:
    secure.client.flushall()
    url = {"FEEDMILL_REDIS_URL": secure.secure_url}
    outputs = []
    for file in (authority.file, authority.other):
        printed = feedmill(
            "url", "--celery", cwd=tmp_path, FEEDMILL_REDIS_CA_FILE=str(file), **url
        )
        assert printed.returncode == 0, printed.stderr
        sent = support.run(
            [sys.executable, "-c", printed.stdout + SENDS], tmp_path, os.environ | url
        )
        outputs.append(sent)
    trusted, untrusted = outputs
    assert trusted.returncode == 0, trusted.stderr
    assert untrusted.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in untrusted.stderr
    assert secure.client.llen("feedmill") == 1
    assert plain_connections(secure) == 0


def send(settings: Settings) -> None:
    publish(make_app(settings), [make_posts(1)], ClassifyOptions())


def take(settings: Settings) -> None:
    make_app(settings).connection_for_read(**lease_options(settings)).connect()


def look_up(settings: Settings) -> None:
    app: Any = make_app(settings)
    app.backend.client.ping()


#: Everything that connects: results and readers, the producer, the worker, and Celery's result
#: backend.
WAYS: dict[str, Callable[[Settings], Any]] = {
    "client": lambda settings: connect(settings).ping(),
    "producer": send,
    "worker": take,
    "backend": look_up,
}


@pytest.fixture(scope="module")
def untrusted(
    authority: support.Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SecureRedis]]:
    """Redis servers with an invalid certificate, keyed by its defect."""
    certificates = {
        "expired": authority.certificate("expired", days=-1),
        "another host's": authority.certificate("host", "example.org"),
    }
    with ExitStack() as stack:
        found = {}
        for name, certificate in certificates.items():
            found[name] = SecureRedis(
                tmp_path_factory.mktemp("redis"), certificate, authority.file
            )
            stack.callback(found[name].stop)
        yield found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("no authority", "self-signed certificate in certificate chain"),
        ("expired", "certificate has expired"),
        ("another host's", "certificate is not valid for '127.0.0.1'"),
    ],
)
def test_sends_nothing_to_untrusted_servers(
    secure: SecureRedis,
    untrusted: dict[str, SecureRedis],
    authority: support.Authority,
    wrong: str,
    words: str,
    way: str,
) -> None:
    server = untrusted.get(wrong, secure)
    settings = load(
        redis_url=server.secure_url,
        redis_ca_file=None if wrong == "no authority" else authority.file,
    )
    before = server.client.info("commandstats")
    with pytest.raises(RedisUnavailable, match=words) as told, user_errors(settings):
        WAYS[way](settings)
    assert support.PASSWORD not in str(told.value)
    assert server.client.info("commandstats").keys() == before.keys() | {"cmdstat_info"}


def test_client_certificates(authority: support.Authority, tmp_path: Path) -> None:
    server = SecureRedis(
        tmp_path, authority.certificate("asking"), authority.file, clients="yes"
    )
    try:
        certificate, key = authority.certificate("client")
        flags = {"redis_url": server.secure_url, "redis_ca_file": authority.file}
        for opens in WAYS.values():
            opens(load(**flags, redis_certificate_file=certificate, redis_key_file=key))
        with (
            pytest.raises(RedisUnavailable, match="FEEDMILL_REDIS_CERTIFICATE_FILE"),
            user_errors(load(**flags)),
        ):
            connect(load(**flags)).ping()
    finally:
        server.stop()


def test_plain_text_to_a_tls_port_mentions_tls(secure: SecureRedis) -> None:
    settings = load(redis_url=secure.secure_url.replace("rediss://", "redis://"))
    with (
        pytest.raises(
            RedisUnavailable, match="FEEDMILL_REDIS_URL must begin with rediss://"
        ),
        user_errors(settings),
    ):
        connect(settings).ping()


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_text_port_never_receives_a_command(
    authority: support.Authority, way: str
) -> None:
    """The server sees only the start of a TLS handshake, and its plain-text answer ends the
    connection.
    """
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def listen() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    heard.append(connection.recv(4096))
                    connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        url = f"rediss://:{support.PASSWORD}@127.0.0.1:{listening.getsockname()[1]}/0"
        settings = load(redis_url=url, redis_ca_file=authority.file)
        words = (
            f"^Redis at {settings.redis_address} is unreachable over TLS "
            ".*FEEDMILL_REDIS_CERTIFICATE_FILE"
        )
        with pytest.raises(RedisUnavailable, match=words), user_errors(settings):
            WAYS[way](settings)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert heard
    assert all(
        each[:2] == b"\x16\x03" and support.PASSWORD.encode() not in each
        for each in heard
    )


def test_tls_to_a_plain_text_port_mentions_tls(
    secure: SecureRedis, authority: support.Authority
) -> None:
    """The connection times out: the server takes the handshake for a part of a command, and waits
    for its end.
    """
    settings = load(
        redis_url=secure.url.replace("redis://", "rediss://"),
        redis_ca_file=authority.file,
    )
    with (
        pytest.raises(
            RedisUnavailable, match="the port in FEEDMILL_REDIS_URL is its TLS port"
        ),
        user_errors(settings),
    ):
        connect_for_monitoring(settings).ping()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"redis_ca_file": "ca"}, "--redis-ca-file: .*rediss://.*FEEDMILL_REDIS_URL"),
        ({"redis_url": "rediss://h?ssl_cert_reqs=none"}, "--redis-url: .*options"),
    ],
)
def test_rejects_incompatible_tls_settings(
    authority: support.Authority, flags: dict[str, str], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        load(
            **{
                name: authority.file if value == "ca" else value
                for name, value in flags.items()
            }
        )


def test_unusable_files_name_their_setting(
    secure: SecureRedis, authority: support.Authority, tmp_path: Path
) -> None:
    for flags in (
        {"redis_ca_file": tmp_path / "missing"},
        {"redis_ca_file": authority.file.with_suffix(".key")},
        {
            "redis_certificate_file": authority.file,
            "redis_key_file": authority.other.with_suffix(".key"),
        },
    ):
        settings = load(
            redis_url=secure.secure_url, **{"redis_ca_file": authority.file} | flags
        )
        with (
            pytest.raises(RedisUnavailable, match="FEEDMILL_REDIS_CA_FILE"),
            user_errors(settings),
        ):
            connect(settings).ping()
