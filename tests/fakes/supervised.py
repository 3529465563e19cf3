"""Supervise two processes that stand in for workers, with short delays before restarting and
killing.

    python -m tests.fakes.supervised COMMAND...

Each process runs COMMAND with `--name NODE` appended.
"""

import sys

from feedmill.cli.options import load_for_command
from feedmill.shared.errors import UserError
from feedmill.stack import processes, supervisor
from feedmill.stack.supervisor import shares


def main(command: list[str]) -> int:
    processes.RESTARTS.first_s = 0.05
    supervisor.KILL_GRACE_S = 0.1
    try:
        return supervisor.Supervisor(
            load_for_command(), shares("cpu:2"), None, command
        ).run()
    except UserError as error:  # reported as in feedmill/cli/main.py
        sys.stderr.write(f"feedmill: {error}\n")
        return processes.USER_ERROR_STATUS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
