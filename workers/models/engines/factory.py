"""Create the configured engine, with its model's tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models.device import Device
from feedmill.workers.models.engines import Engine
from feedmill.workers.models.engines.network import max_row_tokens, read_config
from feedmill.workers.models.engines.static_engine import create_static_engine
from feedmill.workers.models.engines.torch_engine import TorchEngine
from feedmill.workers.models.plugins import load_plugin
from feedmill.workers.models.tokenizer import Tokenizer
from feedmill.workers.models.weights import Weights


def create_engine(
    weights: Weights, device: Device, settings: Settings, reads: Sequence[str] | Path, most: int
) -> tuple[Engine, Any]:
    """Load a model into the configured engine. Return the engine and the model's tokenizer.

    reads: outputs to return, LOGITS or pooling modes (network.py); or the folder of static embeddings. most: maximum
    tokens per row; the model's own limit applies if it is lower.
    Raises ModelError, or SettingsError if the engine is not installed.
    """
    if isinstance(reads, Path):
        return create_static_engine(weights, device, settings, reads, most)
    remote_code = settings.trust_remote_code
    positions = max_row_tokens(read_config(weights, remote_code)) or most
    tokenizer = Tokenizer(weights, min(most, positions), remote_code)
    if settings.engine == "onnx":
        # Imported here because ONNX Runtime is optional.
        from feedmill.workers.models.engines.onnx_engine import OnnxEngine  # noqa: PLC0415

        return OnnxEngine(weights, device, reads, tokenizer.pad_id, settings), tokenizer
    if settings.engine != "torch":
        make = load_plugin(settings.engine, f"{PREFIX}ENGINE")
        return make(weights, device, reads, tokenizer.pad_id, settings), tokenizer
    engine = TorchEngine(weights, device, reads, tokenizer.pad_id, tokenizer.max_tokens, remote_code=remote_code)
    return engine, tokenizer
