"""Parse feeds in a process of its own, within a time and a memory limit.

A document of a few MiB, made for that, keeps every parser busy for minutes, or takes gigabytes; no
limit of a parser covers all of them. So the parser runs in a child process, which is killed if it
takes too long, and started again for the next document. The child ends with its parent, because
its standard input ends.

`documents.py` is what the child runs.
"""

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from feedmill.producers.feeds import documents
from feedmill.producers.feeds.documents import LENGTH_BYTES, READY, Document, Entry
from feedmill.producers.live.source import RequestFailed

#: Seconds for one document, and for the start of the process.
TIMEOUT_S = 20.0
START_TIMEOUT_S = 120.0
#: Maximum length of an answer.
MAX_ANSWER_BYTES = 2**28


class Parser:
    """The client of the child process, which starts with the first document. Not thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def parse(self, body: bytes) -> Document:
        """Return a feed's document. Raises RequestFailed if it is none, or takes too long."""
        is_done = False
        try:
            process = self._process or self._start()
            answer = _exchange(process, body)
            is_done = True
        except TimeoutError:
            raise RequestFailed(
                f"parsing the feed takes longer than {TIMEOUT_S:.0f} s"
            ) from None
        except (OSError, EOFError):
            raise RequestFailed(
                "the feed cannot be parsed: it needs too much memory"
            ) from None
        finally:
            # After an interruption, the next answer would be this document's.
            if not is_done:
                self.close()
        reply = json.loads(answer)
        problem = reply.get("problem")
        if problem:
            raise RequestFailed(problem)
        entries = [Entry(*fields) for fields in reply["entries"]]
        return Document(
            entries=entries,
            interval=reply["interval"],
            whole=reply["whole"],
        )

    def close(self) -> None:
        """End the process. The next document starts it again."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            # -P: nothing is imported from the working directory.
            [sys.executable, "-P", "-m", documents.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the daemon.
            start_new_session=True,
        )
        pipes: Any = self._process
        deadline = time.monotonic() + START_TIMEOUT_S
        _receive(pipes.stdout.fileno(), len(READY), deadline)
        return self._process


def _exchange(process: "subprocess.Popen[bytes]", body: bytes) -> bytes:
    """Send a document, and return the answer. Raises TimeoutError, OSError and EOFError."""
    deadline = time.monotonic() + TIMEOUT_S
    pipes: Any = process
    request = len(body).to_bytes(LENGTH_BYTES, "big") + body
    pipes.stdin.write(request)
    pipes.stdin.flush()
    header = _receive(pipes.stdout.fileno(), LENGTH_BYTES, deadline)
    length = int.from_bytes(header, "big")
    if length > MAX_ANSWER_BYTES:
        raise EOFError
    return _receive(pipes.stdout.fileno(), length, deadline)


def _receive(descriptor: int, size: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        seconds = deadline - time.monotonic()
        readable, _, _ = select.select([descriptor], [], [], max(0.0, seconds))
        if not readable:
            raise TimeoutError
        part = os.read(descriptor, size - len(received))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
