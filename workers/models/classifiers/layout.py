"""Read a sentence-transformers folder: text limits, pooling and dense layers.

modules.json lists the modules: a transformer and one pooling, or static embeddings; then optional dense layers and an
optional normalisation. The sentence-transformers library is not used, because the worker runs the model itself. Nothing
is unpickled.
"""

import re
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from feedmill.shared.errors import ModelError, SettingsError
from feedmill.shared.messages import digest
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models.engines.packing import POOLINGS
from feedmill.workers.models.weights import CONFIG_FILE, MODULES_FILE, WEIGHTS_FILE, Weights, loading, read_json

#: Possible names of the file with the text limits. As in sentence-transformers, the first existing file is read.
TEXT_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
#: Supported modules, by class name without the package.
SUPPORTED_MODULES = frozenset({"Transformer", "Pooling", "StaticEmbedding", "Dense", "Normalize"})
#: Architecture in the config.json of model2vec, whose older versions wrote no modules.json.
MODEL2VEC = "StaticModel"
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
    folder, modules = weights.folder, read_modules(weights.folder)
    if others := [kind for kind, _ in modules if kind not in SUPPORTED_MODULES]:
        raise unsupported(folder / MODULES_FILE, f"the module {others[0]}")
    poolings = [folder / path for kind, path in modules if kind == "Pooling"]
    static = [folder / path for kind, path in modules if kind == "StaticEmbedding"]
    if len(poolings) + len(static) != 1:
        number = f"{len(poolings)} pooling modules and {len(static)} static ones, not one of either"
        raise unsupported(folder / MODULES_FILE, number)
    pooling, with_prompt = _pooling(poolings[0] / CONFIG_FILE) if poolings else ((), True)
    texts = read_text_settings(weights, settings)
    if (texts.post_prompt or texts.label_prompt) and not with_prompt:
        raise unsupported(folder, "a prompt, and include_prompt=false in its pooling")
    dense = [_dense(folder / path) for kind, path in modules if kind == "Dense"]
    kept = texts.config.get("truncate_dim")
    truncate_dim = kept if isinstance(kept, int) and kept > 0 else None
    parts = [*pooling, str(texts.max_tokens), str(texts.lower_case), texts.post_prompt]
    parts += [written for _, written in dense]
    parts += [f"label_prompt={texts.label_prompt}"] if texts.label_prompt != texts.post_prompt else []
    parts += [f"truncate_dim={truncate_dim}"] if truncate_dim else []
    layers = tuple(layer for layer, _ in dense)
    return Layout(pooling, static[0] if static else None, layers, texts, truncate_dim, digest(*parts))


def unsupported(where: object, what: str) -> ModelError:
    """Return the error for a model that needs what Feedmill lacks."""
    return ModelError(f"{where} has {what}, which is not supported. Use another model.")


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class name, without its package, and the folder of each module; none if it has none.

    Raises ModelError.
    """
    if (folder / MODULES_FILE).is_file():
        modules = read_json(folder / MODULES_FILE, list)
        with loading(folder / MODULES_FILE):
            return [(module.get("type", "").rpartition(".")[2], module.get("path", "")) for module in modules]
    # Older versions of model2vec wrote no modules.json.
    is_model2vec = MODEL2VEC in (_read_if_there(folder / CONFIG_FILE).get("architectures") or ())
    return [("StaticEmbedding", "")] if is_model2vec else []


def is_static(weights: Weights) -> bool:
    """Return whether a model has static embeddings instead of a transformer. Raises ModelError."""
    return any(kind == "StaticEmbedding" for kind, _ in read_modules(weights.folder))


def read_text_settings(weights: Weights, settings: Settings) -> TextSettings:
    """Read how the model reads a text. A folder without the files of sentence-transformers has the defaults.

    Raises ModelError, or SettingsError if the model lacks a prompt that the settings name.
    """
    folder = weights.folder
    text_config = read_text_config(folder)
    config = read_sentence_config(folder)
    limit = text_config.get("max_seq_length")
    limit = limit if isinstance(limit, int) and limit > 0 else None
    of_posts = _prompt("post_prompt", settings.post_prompt, config)
    of_labels = _prompt("label_prompt", settings.label_prompt, config)
    return TextSettings(limit, bool(text_config.get("do_lower_case")), of_posts, of_labels, config)


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return the content of the first of TEXT_CONFIGS; empty if there is none. Raises ModelError."""
    return next((_read_if_there(folder / name) for name in TEXT_CONFIGS if (folder / name).is_file()), {})


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


def read_sentence_config(folder: Path) -> dict[str, Any]:
    """Return the content of config_sentence_transformers.json; empty if there is none. Raises ModelError."""
    return _read_if_there(folder / "config_sentence_transformers.json")


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the pooling modes, and whether the prompt's tokens are pooled too."""
    config = read_json(path)
    configured = config.get("pooling_mode")
    modes = (configured,) if isinstance(configured, str) else tuple(configured or ())
    modes = modes or tuple(mode for name, mode in LEGACY_POOLING_KEYS.items() if config.get(name)) or ("mean",)
    if others := [mode for mode in modes if mode not in POOLINGS]:
        raise unsupported(path, f"pooling_mode={others[0]!r}")
    return modes, bool(config.get("include_prompt", True))


def _dense(folder: Path) -> tuple[torch.nn.Module, str]:
    """Return the dense layer with its activation, and a digest of both."""
    file, config = folder / WEIGHTS_FILE, read_json(folder / CONFIG_FILE)
    ends = {config.get("module_input_name"), config.get("module_output_name")}
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if config.get("use_residual") or ends - {None, "sentence_embedding"}:
        raise unsupported(folder / CONFIG_FILE, "use_residual, or inputs other than sentence_embedding")
    with loading(f"the dense layer in {file}"):
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bool(config.get("bias", True)))
        tensors = load_file(file)
        linear.load_state_dict({key.removeprefix("linear."): value.float() for key, value in tensors.items()})
        layer = torch.nn.Sequential(linear, activation(name, folder)).eval()
        return layer, f"{sha256(file.read_bytes()).hexdigest()} {name}"


def activation(path: str, folder: Path) -> torch.nn.Module:
    """Return torch.nn's activation of a class path, such as torch.nn.modules.activation.GELU. Raises ModelError."""
    with loading(f"the activation {path} of {folder}", "Use another model."):
        module: torch.nn.Module = getattr(torch.nn, path.rpartition(".")[2])()
        return module


def _read_if_there(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is none, or if it is no object. Raises ModelError."""
    content = read_json(path, object) if path.is_file() else {}
    return content if isinstance(content, dict) else {}
