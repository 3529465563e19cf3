"""What `python -m tests.fuzz --engine atheris` starts: elements that coverage leads to, read as a worker reads them.

Arguments are libFuzzer's.
"""

import base64
import json
import sys

import atheris

with atheris.instrument_imports(include=["shared", "workers"]):
    from tests.fakes.hostile_messages import good
    from tests.fuzz import read


def each(data: bytes) -> None:
    """An element as it is, or, begun with a bang, the body of a good message."""
    if data.startswith(b"!"):
        data = json.dumps(good() | {"body": base64.b64encode(data[1:]).decode()}).encode()
    read(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, each)
    atheris.Fuzz()
