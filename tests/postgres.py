"""A PostgreSQL server for tests, on loopback, with a password, that can be killed and
restarted.
"""

import os
import shutil
import signal
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from pwd import getpwnam
from subprocess import run
from typing import Any

import psycopg

from feedmill.stack.processes import Child
from tests.support import PASSWORD, free_port, wait_until

#: User of the database, and name of the database.
USER, DATABASE = "feedmill", "postgres"


@cache
def postgres_folder() -> Path | None:
    """Return the folder of PostgreSQL's programs, which Debian keeps off PATH; None if it is not
    installed.
    """
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"),
        key=lambda path: float(path.parts[-3]),
    )
    return versions[-1].parent if versions else None


class PostgresServer:
    """A PostgreSQL server in a temporary folder. durable: flush transactions to disk, which
    killing does not need.
    """

    def __init__(self, programs: Path, durable: bool = False) -> None:
        self.port = free_port()
        self.url = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{DATABASE}"
        self._programs, self._fsync = programs, "on" if durable else "off"
        # Not pytest's folder: other users cannot enter it.
        self.folder = Path(tempfile.mkdtemp(prefix="feedmill-postgres-"))
        self._as_user: list[str] = []
        if os.getuid() == 0:  # PostgreSQL refuses root
            user = _unprivileged_user()
            shutil.chown(self.folder, user, getpwnam(user).pw_gid)
            self._as_user = [
                "setpriv",
                f"--reuid={user}",
                f"--regid={getpwnam(user).pw_gid}",
                "--clear-groups",
            ]
            self._as_user += ["--pdeathsig", "KILL"]
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        command = [
            str(programs / "initdb"),
            "-D",
            str(self.folder / "data"),
            "-U",
            USER,
            "--encoding=UTF8",
        ]
        options = [
            "--locale=C",
            "--auth=scram-sha-256",
            f"--pwfile={secret}",
            "--no-sync",
        ]
        run(
            [*self._as_user, *command, *options],
            cwd=self.folder,
            check=True,
            capture_output=True,
        )
        self.start()

    def start(self) -> None:
        command = [
            str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-p",
            str(self.port),
            "-k", str(self.folder), "-c", "listen_addresses=127.0.0.1", "-c",
            f"fsync={self._fsync}",
        ]  # fmt: skip
        self._child = Child(
            "postgres", [*self._as_user, *command], self.folder, dict(os.environ)
        )
        self._child.wait_until(self._answers)

    def _answers(self) -> bool:
        with suppress(psycopg.Error):
            return self.rows("SELECT 1") == [(1,)]
        return False

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query, or an empty list if it has none."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(query.encode(), parameters or None)
            return found.fetchall() if found.description else []

    def kill(self) -> None:
        """End all of the server's processes with SIGKILL."""
        server = self._child.process.pid
        os.kill(server, signal.SIGSTOP)  # it starts no other child meanwhile
        children = [
            int(each)
            for each in Path(f"/proc/{server}/task/{server}/children")
            .read_text()
            .split()
        ]
        self._child.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        wait_until(
            lambda: not any(map(_runs, children)), "PostgreSQL's processes are gone"
        )

    def stop(self) -> None:
        self._child.process.send_signal(
            signal.SIGINT
        )  # ends sessions; SIGTERM waits for them
        self._child.process.wait(60)
        shutil.rmtree(self.folder)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _unprivileged_user() -> str:
    with suppress(KeyError):
        return getpwnam("postgres").pw_name
    return "nobody"
