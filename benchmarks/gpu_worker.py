"""A Feedmill command, with waits for the GPU that spin if GPU_WAITS=spin.

    python -m benchmarks.gpu_worker worker --devices 0

Otherwise it is `feedmill`. Workers that a supervisor starts are started as this program, too.
"""

import os
import sys

from feedmill.cli.main import run
from feedmill.stack import processes, supervisor

#: Environment variable that chooses how workers wait.
WAITS = "GPU_WAITS"


def python_command() -> list[str]:
    """Return the command of this program, for the supervisor."""
    return [sys.executable, "-m", "benchmarks.gpu_worker"]


if __name__ == "__main__":
    for module in (processes, supervisor):
        vars(module)["python_command"] = python_command
    if os.environ.get(WAITS) == "spin":
        from feedmill.workers.models import engines

        engines.BLOCKING_WAITS = False
    run()
