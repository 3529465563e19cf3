"""Read a sentence-transformers folder: text limits, pooling and dense layers.

modules.json lists the modules: a transformer and one pooling, or static embeddings; then optional dense layers and an
optional normalisation. The sentence-transformers library is not used, because the worker runs the model itself. Nothing
is unpickled.
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from feedmill.shared.errors import ModelError, SettingsError, clause
from feedmill.shared.messages import digest
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models.engines.network import POOLINGS
from feedmill.workers.models.weights import CONFIG_FILE, MODULES_FILE, Weights

#: Possible names of the file with the text limits. As in sentence-transformers, the first existing file is read.
TEXT_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: Supported modules, by class name without the package.
SUPPORTED_MODULES = frozenset({"Transformer", "Pooling", "StaticEmbedding", "Dense", "Normalize"})
#: Architecture in the config.json of model2vec, whose older versions wrote no modules.json.
MODEL2VEC = "StaticModel"
#: Supported activations of dense layers, as in torch.nn.
ACTIVATIONS = frozenset({"Identity", "Tanh", "ReLU", "GELU"})
#: Value of the prompt settings for no prompt.
NO_PROMPT = "none"
#: Values of the prompt settings that are names, not texts.
PROMPT_NAME = re.compile(r"[\w.-]+")
#: Pooling mode by the boolean key that selects it in older configurations, which have no `pooling_mode`.
LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class TextSettings(NamedTuple):
    """How a sentence-transformers model reads a text."""

    #: Maximum tokens per text; None if the folder sets no limit.
    max_tokens: int | None
    lower_case: bool
    #: Prefix of each post.
    post_prompt: str
    #: Prefix of each label's sentence.
    label_prompt: str
    #: Content of config_sentence_transformers.json; empty if there is none.
    config: dict[str, Any]


class Layout(NamedTuple):
    """The parts of a sentence-transformers model besides its transformer.

    pooling: modes whose vectors are concatenated. static: the folder of static embeddings, for a model without a
    transformer and pooling. dense: layers applied after pooling; float32, created on the CPU.
    """

    pooling: tuple[str, ...]
    static: Path | None
    dense: tuple[torch.nn.Module, ...]
    texts: TextSettings
    #: Dimensions to keep of each embedding; None for all.
    truncate_dim: int | None
    #: Digest of the fields above and the dense weights: of all that determines an embedding, except the transformer.
    digest: str


def read_layout(weights: Weights, settings: Settings) -> Layout:
    """Read the folder's layout. Raises ModelError if a part is missing, invalid or unsupported.

    Raises SettingsError if the model lacks a prompt that the settings name.
    """
    folder = weights.folder
    modules_file = folder / MODULES_FILE
    if not modules_file.is_file() and is_model2vec(_json_if_there(folder / CONFIG_FILE)):
        listed: Any = [{"type": "StaticEmbedding"}]
    elif not modules_file.is_file():
        raise ModelError(
            f"{folder} is not a sentence-transformers model: modules.json is missing. Use such a model, or set another "
            "FEEDMILL_CLASSIFIER."
        )
    else:
        listed = _json(modules_file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ModelError(f"{modules_file} must contain a list of modules. Download the model again.")
    modules = [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in listed]
    if unsupported := [kind for kind, _ in modules if kind not in SUPPORTED_MODULES]:
        raise ModelError(f"{modules_file} has an unsupported module: {unsupported[0]}. Use a model without it.")
    poolings = [path for kind, path in modules if kind == "Pooling"]
    static = [folder / path for kind, path in modules if kind == "StaticEmbedding"]
    if len(poolings) + len(static) != 1:
        raise ModelError(
            f"{modules_file} has {len(poolings)} pooling modules and {len(static)} static ones; exactly one of either "
            "is supported. Use another model."
        )
    pooling, with_prompt = _pooling(folder / poolings[0] / "config.json") if poolings else ((), True)
    texts = read_text_settings(weights, settings)
    if (texts.post_prompt or texts.label_prompt) and not with_prompt:
        raise ModelError(
            f"{folder} has include_prompt=false in its pooling, which is not supported. Use another model."
        )
    dense = [_dense(folder / path) for kind, path in modules if kind == "Dense"]
    truncate_dim = _truncate_dim(texts.config, settings)
    parts = [*pooling, str(texts.max_tokens), str(texts.lower_case), texts.post_prompt]
    parts += [written for _, written in dense]
    # Only where they differ from the defaults, so that they leave the identity of earlier results as it was.
    parts += [f"label_prompt={texts.label_prompt}"] if texts.label_prompt != texts.post_prompt else []
    parts += [f"truncate_dim={truncate_dim}"] if truncate_dim else []
    return Layout(
        pooling, next(iter(static), None), tuple(layer for layer, _ in dense), texts, truncate_dim, digest(*parts)
    )


def is_model2vec(config: Mapping[str, Any]) -> bool:
    """Return whether a model was written by model2vec. config: its config.json."""
    return MODEL2VEC in (config.get("architectures") or ())


def is_static(weights: Weights) -> bool:
    """Return whether a model has static embeddings instead of a transformer. Raises ModelError."""
    path = weights.folder / MODULES_FILE
    modules = _json(path) if path.is_file() else None
    listed = isinstance(modules, list) and any("StaticEmbedding" in str(module) for module in modules)
    return listed or is_model2vec(_json_if_there(weights.folder / CONFIG_FILE))


def read_text_settings(weights: Weights, settings: Settings) -> TextSettings:
    """Read how the model reads a text. A folder without the files of sentence-transformers has the defaults.

    Raises ModelError, or SettingsError if the model lacks a prompt that the settings name.
    """
    folder = weights.folder
    text_config = next((_json_if_there(folder / name) for name in TEXT_CONFIGS if (folder / name).is_file()), {})
    config = read_sentence_config(folder)
    limit = text_config.get("max_seq_length")
    limit = limit if isinstance(limit, int) and limit > 0 else None
    of_posts = _prompt("post_prompt", settings.post_prompt, config)
    of_labels = _prompt("label_prompt", settings.label_prompt, config)
    return TextSettings(limit, bool(text_config.get("do_lower_case")), of_posts, of_labels, config)


def _prompt(setting: str, chosen: str | None, config: dict[str, Any]) -> str:
    """Return the text of the chosen prompt, or of the model's default if none is chosen. Raises SettingsError."""
    prompts = config.get("prompts") or {}
    if chosen is None:
        return str(prompts.get(config.get("default_prompt_name") or "") or "")
    if chosen in prompts:
        return str(prompts[chosen] or "")
    if chosen == NO_PROMPT:
        return ""
    if PROMPT_NAME.fullmatch(chosen):
        known = f"it has {', '.join(prompts)}" if prompts else "it has none"
        raise SettingsError(
            f"{PREFIX}{setting.upper()}: the model has no prompt named {chosen!r}; {known}. Set a name that it has, or "
            f"a text with its final space, such as {chosen + ': '!r}."
        )
    return chosen


def _truncate_dim(config: dict[str, Any], settings: Settings) -> int | None:
    """Return the dimensions to keep: as set, else as in the model's configuration."""
    found = settings.truncate_dim or config.get("truncate_dim")
    return found if isinstance(found, int) and found > 0 else None


def read_sentence_config(folder: Path) -> dict[str, Any]:
    """Return the content of config_sentence_transformers.json; empty if there is none. Raises ModelError."""
    return _json_if_there(folder / "config_sentence_transformers.json")


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the pooling modes, and whether the prompt's tokens are pooled too."""
    config = _json(path)
    configured = config.get("pooling_mode")
    modes = (configured,) if isinstance(configured, str) else tuple(configured or ())
    modes = modes or tuple(mode for name, mode in LEGACY_POOLING_KEYS.items() if config.get(name)) or ("mean",)
    if unsupported := [mode for mode in modes if mode not in POOLINGS]:
        raise ModelError(
            f"{path} has an unsupported pooling_mode: {unsupported[0]!r}. Use a model with one of: "
            f"{', '.join(sorted(POOLINGS))}."
        )
    return modes, bool(config.get("include_prompt", True))


def _dense(folder: Path) -> tuple[torch.nn.Module, str]:
    """Return the dense layer with its activation, and a digest of both."""
    config = _json(folder / "config.json")
    ends = {config.get("module_input_name"), config.get("module_output_name")}
    if config.get("use_residual") or ends - {None, "sentence_embedding"}:
        raise ModelError(
            f"{folder / 'config.json'} has use_residual, or inputs other than sentence_embedding, which is not "
            "supported. Use another model."
        )
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ModelError(f"{folder / 'config.json'} has an unsupported activation_function: {name}. Use another model.")
    try:
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bool(config.get("bias", True)))
        tensors = load_file(folder / "model.safetensors")
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in tensors.items()})
    except (OSError, KeyError, TypeError, RuntimeError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"Cannot read the dense layer in {folder / 'model.safetensors'}: {clause(error)}. Download the model again."
        ) from error
    written = sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return torch.nn.Sequential(linear, getattr(torch.nn, name)()).eval(), f"{written} {name}"


def _json_if_there(path: Path) -> dict[str, Any]:
    found = _json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _json(path: Path) -> Any:
    """Parse a JSON file. Raises ModelError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {path}: {clause(error)}. Download the model again.") from None
