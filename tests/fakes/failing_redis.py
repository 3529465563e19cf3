"""A Redis that answers with errors: a proxy on loopback that forwards commands until it is told to
fail.
"""

import socket
import socketserver
import threading
from contextlib import suppress
from io import BufferedReader
from typing import Any, NamedTuple

#: Maximum number of bytes forwarded at once.
PIECE = 65_536


class Answer(NamedTuple):
    """An error of Redis, or an answer of another server.

    words: parts of the error that Feedmill shows. ends: whether Redis will answer the same command
    later, by itself.
    """

    line: bytes
    words: tuple[str, ...]
    ends: bool = False

    @property
    def reply(self) -> bytes:
        return self.line + b"\r\n"


BUSY = Answer(
    b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    ("BUSY", "SCRIPT KILL", "FUNCTION KILL"), True,
)  # fmt: skip
MAX_CLIENTS = Answer(b"-ERR max number of clients reached", ("`maxclients`",), True)
HTTP = Answer(
    b"HTTP/1.1 400 Bad Request\r\nConnection: close", ("protocol", "rediss://"), True
)
LOADING = Answer(b"-LOADING Redis is loading the dataset in memory", ("LOADING",), True)
NOPERM = Answer(
    b"-NOPERM User default has no permissions to run the 'get' command",
    ("user default", "docs/redis.md"),
)
#: Answers to a command.
ANSWERS = (
    BUSY,
    MAX_CLIENTS,
    HTTP,
    LOADING,
    NOPERM,
    Answer(b"-BUSY Valkey is busy running a script. You can only call FUNCTION KILL or SHUTDOWN",
    ("BUSY",), True),
    Answer(b"-UNKILLABLE Sorry the script already executed write commands against the dataset.",
    ("BUSY",), True),
    Answer(b"-ERR Error running script: Script killed by user with SCRIPT KILL.",
    ("SCRIPT KILL", "Try again"), True),
    Answer(b"-ERR max number of clients + cluster connections reached", ("`maxclients`",), True),
    Answer(b"-MISCONF Redis is configured to save RDB snapshots, but it's unable to",
    ("MISCONF", "disk"), True),
    Answer(b"-MISCONF Errors writing to the AOF file: No space left on device",
    ("MISCONF", "disk"), True),
    Answer(b"-NOREPLICAS Not enough good replicas to write.", ("`min-replicas-to-write`",), True),
    Answer(b"-READONLY You can't write against a read only replica.",
    ("replica", "FEEDMILL_REDIS_URL"), True),
    Answer(b"-UNBLOCKED force unblock from blocking operation, instance state changed",
    ("replica",), True),
    Answer(b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    ("MASTERDOWN",), True),
    Answer(b"-OOM command not allowed when used memory > 'maxmemory'.", ("`maxmemory`",), True),
    Answer(b"-NOAUTH Authentication required.", ("password",)),
    Answer(b"-WRONGPASS invalid username-password pair or user is disabled.", ("password",)),
    Answer(
        b"-ERR AUTH <password> called without any password configured for the default user. "
        b"Are you sure your "
        b"configuration is correct?", ("has no password", "FEEDMILL_REDIS_URL"),
    ),
    Answer(b"-DENIED Redis is running in protected mode because",
    ("protected mode", "`requirepass`")),
    Answer(b"-WRONGTYPE Operation against a key holding the wrong kind of value",
    ("another database",)),
    Answer(b"-CLUSTERDOWN The cluster is down", ("Cluster",)),
    Answer(b"-MOVED 3999 127.0.0.1:6381", ("Cluster", "127.0.0.1:6381")),
    Answer(b"-ASK 3999 127.0.0.1:6381", ("Cluster",)),
    Answer(b"-CROSSSLOT Keys in request don't hash to the same slot", ("Cluster",)),
    Answer(b"-TRYAGAIN Multiple keys request during rehashing of slot", ("Cluster",)),
    Answer(b"-ERR DB index is out of range", ("FEEDMILL_REDIS_URL", "`databases`")),
    Answer(b"-ERR unknown command 'FCALL', with args beginning with: 'get' ",
    ("Redis 7.0", "docs/redis.md")),
    Answer(b"-EXECABORT Transaction discarded because of previous errors.",
    ("discarded", "FEEDMILL_LOG_LEVEL")),
    Answer(b"-ERR an error of the future", ("an error of the future", "FEEDMILL_LOG_LEVEL")),
    Answer(b"* OK IMAP4rev1 ready", ("protocol", "rediss://"), True),
    Answer(b"\x15\x03\x03\x00\x02\x02\x46", ("protocol", "rediss://"), True),
)  # fmt: skip
#: What is sent on each new connection, which then ends.
GREETINGS = (
    MAX_CLIENTS,
    Answer(b"-DENIED Redis is running in protected mode because", ("protected mode",)),
    Answer(b"SSH-2.0-OpenSSH_9.2", ("protocol", "rediss://"), True),
    Answer(b"220 mail.example.org ESMTP", ("protocol", "rediss://"), True),
)


class FailingRedis:
    """A proxy in front of a redis-server. It runs on threads until `stop`.

    `commands` counts the commands of all connections since the last call of `fail` or `heal`,
    including those by which clients log in.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.commands = 0
        self._lock = threading.Lock()
        self._reply = b""
        self._after = 0
        self._greets = False
        self._clients: set[socket.socket] = set()
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.connection, self.rfile)  # type: ignore[arg-type]  # it is a BufferedReader

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients close their connections at any moment."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, name="failing-redis", daemon=True
        ).start()

    def fail(self, answer: Answer, after: int = 0) -> None:
        """Give this answer to each command but the first `after` ones."""
        with self._lock:
            self._reply, self._after, self._greets, self.commands = (
                answer.reply,
                after,
                False,
                0,
            )

    def greet(self, reply: bytes) -> None:
        """Send these bytes on each new connection, and close it without reading, as Redis does
        beyond `maxclients`.
        """
        with self._lock:
            self._reply, self._after, self._greets, self.commands = reply, 0, True, 0

    def heal(self) -> None:
        """Forward commands again, on new connections."""
        with self._lock:
            self._reply, self._greets, self.commands = b"", False, 0
        self._drop_connections()

    def _drop_connections(self) -> None:
        for client in tuple(self._clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._drop_connections()

    def _serve(self, client: socket.socket, commands: BufferedReader) -> None:
        if self._greets:
            with suppress(OSError):
                client.sendall(self._reply)
            return
        self._clients.add(client)
        try:
            with socket.create_connection(("127.0.0.1", self.server_port)) as server:
                self._forward(client, commands, server)
        except OSError:
            pass  # one of them has closed the connection
        finally:
            self._clients.discard(client)

    def _forward(
        self, client: socket.socket, commands: BufferedReader, server: socket.socket
    ) -> None:
        """Pass on commands until one fails; then answer this one and all later ones."""
        answers = threading.Thread(
            target=self._pass_on, args=(server, client), daemon=True
        )
        answers.start()
        has_failed = False
        while command := _command(commands):
            reply = self._failure()
            if reply is None and has_failed:
                return
            if reply is None:
                server.sendall(command)
                continue
            if not has_failed:
                has_failed = True
                # The server answers what it has read, and closes the connection.
                server.shutdown(socket.SHUT_WR)
                answers.join(10)
            client.sendall(reply)

    def _failure(self) -> bytes | None:
        """Count a command, and return the answer of a failing one."""
        with self._lock:
            self.commands += 1
            return self._reply if self._reply and self.commands > self._after else None

    def _pass_on(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while piece := server.recv(PIECE):
                client.sendall(piece)


def _command(stream: BufferedReader) -> bytes:
    """Read one command in Redis' protocol; b"" at the end of the connection."""
    parts = [stream.readline()]
    if not parts[0].startswith(b"*"):
        return parts[0]
    for _ in range(int(parts[0][1:])):
        size = stream.readline()
        parts += [size, stream.read(int(size[1:]) + 2)]
    return b"".join(parts)
