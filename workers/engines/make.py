"""Makes the engine that the settings ask for, with the tokenizer of its model."""

from collections.abc import Sequence

from shared.errors import DeviceFull, ModelError
from shared.settings import Settings
from workers.device import Device
from workers.engines import Engine
from workers.engines.network import most_tokens, read_config
from workers.engines.torch_engine import TorchEngine
from workers.plugins import plugin
from workers.tokenizer import Tokenizer
from workers.weights import Weights


def make_engine(
    weights: Weights, device: Device, settings: Settings, reads: Sequence[str], most: int
) -> tuple[Engine, Tokenizer]:
    """reads: what is read off the model, see network.py. most: tokens of a row, at most, where the model takes as many.

    Raises ModelError, or SettingsError where the engine is not installed.
    """
    remote_code = settings.trust_remote_code
    config = read_config(weights, remote_code)
    tokenizer = Tokenizer(weights, min(most, most_tokens(config) or most), remote_code)
    if config.model_type == "bart" and tokenizer.single(["a"])[0].ids[-1] != config.eos_token_id:
        raise ModelError(
            f"The tokenizer of {weights.name} does not end its rows with the token that its model looks for."
        )
    try:
        if settings.engine == "onnx":
            # Imported here: who does not use it need not have it.
            from workers.engines.onnx_engine import OnnxEngine  # noqa: PLC0415

            engine: Engine = OnnxEngine(weights, device, reads, tokenizer.pad_id, settings)
        elif settings.engine != "torch":
            engine = plugin(settings.engine, "engine")(weights, device, reads, tokenizer.pad_id, settings)
        else:
            engine = TorchEngine(
                weights,
                device,
                reads,
                tokenizer.pad_id,
                tokenizer.max_tokens,
                compiled=settings.compile,
                remote_code=remote_code,
            )
    except DeviceFull as full:
        raise ModelError(f"{weights.name} does not fit {device.name}: {full}") from None
    return engine, tokenizer
