"""Fill a stand-in GPU with stand-in workers, without waiting long for a steady rate.

    python -m tests.fakes.filled

Its device is the file STANDIN_DEVICE, with a lock: it computes one pass at a time, whichever
process asks. The machine's cores are made up, so that they do not limit the workers.
"""

import sys

from feedmill.cli.options import load_for_command
from feedmill.stack import filler, filling, supervisor


def main() -> int:
    filling.STEADY_S = 0.5
    filler.CHECK_INTERVAL_S = 0.1
    filler.WAITING_S = 0.2
    cores = [frozenset({number}) for number in range(5)]
    supervisor.cores_by_package = lambda: cores
    settings = load_for_command()
    gpu_filler = filler.Filler(settings, ["0"])
    command = [sys.executable, "-m", "tests.fakes.standin_worker"]
    return supervisor.Supervisor(
        settings,
        gpu_filler.first_shares(),
        "mill@here",
        command,
        additions=gpu_filler,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
