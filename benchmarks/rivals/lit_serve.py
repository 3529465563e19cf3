"""Serve the model with LitServe and its dynamic batching, as LitServe's documentation shows.

python -m benchmarks.rivals.lit_serve PORT
"""

import signal
import sys
from typing import Any

import litserve

from benchmarks.rivals import BATCH_SIZE
from benchmarks.rivals.plain_model import Answer, PlainModel
from feedmill.shared.settings import load
from feedmill.workers.models import device

#: Seconds to wait for a batch to fill.
BATCH_TIMEOUT_S = 0.01


class ClassifierAPI(litserve.LitAPI):
    """The model's API, run by one LitServe worker."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - the settings choose the device
        self._model = PlainModel(load())

    def decode_request(self, request: dict[str, Any]) -> Any:
        return request["text"]

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, texts: list[str]) -> list[Answer]:
        return self._model.classify(texts)

    def unbatch(self, output: list[Answer]) -> list[Answer]:
        return output

    def encode_response(self, output: Answer) -> Answer:
        return output


def main() -> None:
    settings = load()
    kind = device.select_device(settings.device, settings.dtype).torch.type
    server = litserve.LitServer(
        ClassifierAPI(max_batch_size=BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S),
        accelerator=kind,
        devices=1,
        timeout=False,
    )
    # SIGTERM acts like Ctrl-C, so that LitServe stops its other processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
