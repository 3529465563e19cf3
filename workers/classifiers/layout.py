"""What a sentence-transformers folder says of its model: what it reads of a text, and how that becomes one vector.

The folder names its modules in modules.json: a transformer, a pooling, sometimes dense layers, a normalisation. Read
here rather than by sentence-transformers, since a worker runs the transformer itself. Nothing is unpickled.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from shared.errors import ModelError
from shared.messages import digest
from workers.engines.network import POOLINGS
from workers.weights import Weights

#: Where the limits of a text stand: the first that is there, as sentence-transformers looks for them.
TEXT_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: Modules that are understood, by the last part of their class's name.
UNDERSTOOD = frozenset({"Transformer", "Pooling", "Dense", "Normalize"})
#: What the pooling's configuration called its ways before there was `pooling_mode`.
OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Layout(NamedTuple):
    """pooling: ways whose vectors are joined. dense: layers behind it, in float32 on the CPU."""

    pooling: tuple[str, ...]
    dense: tuple[torch.nn.Module, ...]
    #: Tokens of a text that are read, at most; None where the folder does not say.
    max_tokens: int | None
    lower_case: bool
    #: What is put before each text.
    prompt: str
    #: Of all that is above, dense weights included: what decides an embedding besides the transformer.
    digest: str


def read_layout(weights: Weights) -> Layout:
    """Raises ModelError where it is no sentence-transformers folder, or one with something that is not understood."""
    folder = weights.folder
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        raise ModelError(
            f"{folder} is no sentence-transformers model: it has no modules.json. Classifying by similarity needs one."
        )
    listed = _json(modules_file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ModelError(f"{modules_file} should be a list of modules.")
    modules = [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in listed]
    if odd := [kind for kind, _ in modules if kind not in UNDERSTOOD]:
        raise ModelError(f"{modules_file} has a module {odd[0]}, which is not supported.")
    poolings = [path for kind, path in modules if kind == "Pooling"]
    if len(poolings) != 1:
        raise ModelError(f"{modules_file} has {len(poolings)} poolings; one is expected.")
    pooling, with_prompt = _pooling(folder / poolings[0] / "config.json")
    of_texts = next((_json_if_there(folder / name) for name in TEXT_CONFIGS if (folder / name).is_file()), {})
    of_prompts = _json_if_there(folder / "config_sentence_transformers.json")
    prompt = (of_prompts.get("prompts") or {}).get(of_prompts.get("default_prompt_name") or "") or ""
    if prompt and not with_prompt:
        raise ModelError(f"{folder} leaves its prompt out of the pooling, which is not supported.")
    limit = of_texts.get("max_seq_length")
    limit = limit if isinstance(limit, int) and limit > 0 else None
    lower_case = bool(of_texts.get("do_lower_case"))
    dense = [_dense(folder / path) for kind, path in modules if kind == "Dense"]
    parts = [*pooling, str(limit), str(lower_case), prompt, *(digest_of for _, digest_of in dense)]
    return Layout(pooling, tuple(layer for layer, _ in dense), limit, lower_case, prompt, digest(*parts))


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    """Its ways, and whether the prompt's tokens are pooled as well."""
    config = _json(path)
    named = config.get("pooling_mode")
    ways = (named,) if isinstance(named, str) else tuple(named or ())
    ways = ways or tuple(way for name, way in OLD_NAMES.items() if config.get(name)) or ("mean",)
    if odd := [way for way in ways if way not in POOLINGS]:
        raise ModelError(f"{path} asks for pooling by {odd[0]!r}; {', '.join(sorted(POOLINGS))} are supported.")
    return ways, bool(config.get("include_prompt", True))


def _dense(folder: Path) -> tuple[torch.nn.Module, str]:
    """The layer, and a digest of it."""
    config = _json(folder / "config.json")
    if config.get("use_residual") or {config.get(f"module_{end}_name") for end in ("input", "output")} - {
        None,
        "sentence_embedding",
    }:
        raise ModelError(f"{folder / 'config.json'} asks for a residual, or for other inputs: that is not supported.")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    activation = {
        "Identity": torch.nn.Identity,
        "Tanh": torch.nn.Tanh,
        "ReLU": torch.nn.ReLU,
        "GELU": torch.nn.GELU,
    }.get(name)
    if activation is None:
        raise ModelError(f"{folder / 'config.json'} asks for the activation {name}, which is not supported.")
    try:
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bool(config.get("bias", True)))
        tensors = load_file(folder / "model.safetensors")
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in tensors.items()})
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"The dense layer in {folder} cannot be read (model.safetensors is needed): {error}"
        ) from error
    written = sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return torch.nn.Sequential(linear, activation()).eval(), f"{written} {name}"


def _json_if_there(path: Path) -> dict[str, Any]:
    found = _json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _json(path: Path) -> Any:
    """Raises ModelError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
