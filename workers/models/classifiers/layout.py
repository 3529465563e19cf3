"""Read a sentence-transformers folder: text limits, pooling and dense layers.

modules.json lists the modules in the order in which they run: a transformer and one pooling, or
static embeddings; then any sequence of dense layers and normalisations. The sentence-transformers
library is not used, because the worker runs the model itself. Nothing is unpickled.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from feedmill.shared.errors import ModelError, SettingsError, printable
from feedmill.shared.messages import digest
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models import files
from feedmill.workers.models.engines.packing import POOLINGS
from feedmill.workers.models.files import (
    CONFIG_FILE,
    MODULES_FILE,
    WEIGHTS_FILE,
    loading,
    read_json,
    sha256_of,
)
from feedmill.workers.models.tensors import TensorFile
from feedmill.workers.models.weights import Weights

#: Possible names of the file with the text limits. As in sentence-transformers, the first existing
#: file is read.
TEXT_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in (
        "bert",
        "roberta",
        "distilbert",
        "camembert",
        "albert",
        "xlm-roberta",
        "xlnet",
    )
)
#: Sequences of modules that turn a text into a vector, by class name without the package.
FIRST_MODULES = (("Transformer", "Pooling"), ("StaticEmbedding",))
#: Modules that may follow them in any order and number.
LATER_MODULES = frozenset({"Dense", "Normalize"})
#: Package whose classes the names above mean. Code of other packages may compute anything else.
MODULES_PACKAGE = "sentence_transformers."
#: Options of the transformer that decide what it returns, and their usual values.
TRANSFORMER_OPTIONS = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "query_expansion": None,
}
#: Options of the transformer that are passed on to transformers, by their newer and older names.
PASSED_OPTIONS = (
    "config_kwargs", "config_args", "model_kwargs", "model_args", "processor_kwargs",
    "tokenizer_args",
    "processing_kwargs",
)  # fmt: skip
#: Keys in them that change where and how a model is loaded, and not what it computes.
LOADING_KEYS = frozenset(
    {
        "add_pooling_layer", "attn_implementation", "cache_dir", "device_map", "dtype",
        "local_files_only",
        "low_cpu_mem_usage", "revision", "token", "torch_dtype", "trust_remote_code",
        "use_cache", "use_safetensors",
    }
)  # fmt: skip
#: Names another model, whose tokenizer is used.
TOKENIZER_OPTION = "tokenizer_name_or_path"
#: The only value that a module after the pooling may read and write.
SENTENCE_EMBEDDING = "sentence_embedding"
#: Architecture in the config.json of model2vec, whose older versions wrote no modules.json.
MODEL2VEC = "StaticModel"
#: Value of the prompt settings for no prompt.
NO_PROMPT = "none"
#: Values of the prompt settings that are names, not texts.
PROMPT_NAME = re.compile(r"[\w.-]+")
#: Pooling mode by the boolean key that selects it in older configurations, which have no
#: `pooling_mode`.
LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class TextSettings(NamedTuple):
    """The text processing of a sentence-transformers model."""

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

    pooling: modes whose vectors are concatenated. static: the folder of static embeddings, for a
    model without a transformer and pooling. steps: dense layers and normalisations, in the order
    in which they apply to the pooled vectors; float32, created on the CPU. A normalisation that
    ends the sequence is left out, because every classifier normalizes the result.
    """

    pooling: tuple[str, ...]
    static: Path | None
    steps: tuple[torch.nn.Module, ...]
    texts: TextSettings
    #: Dimensions to keep of each embedding; None for all.
    truncate_dim: int | None
    #: Digest of the fields above and the dense weights: of all that determines an embedding,
    #: except the transformer.
    digest: str


def read_layout(weights: Weights, settings: Settings) -> Layout:
    """Read the folder's layout. Raises ModelError if a part is missing, invalid or unsupported.

    Raises SettingsError if the model lacks a prompt that the settings name.
    """
    folder = weights.folder
    modules = read_modules(folder)
    kinds = []
    # The folder of each module, the first one of its class.
    folders: dict[str, Path] = {}
    for kind, path in modules:
        kinds.append(kind)
        folders.setdefault(kind, folder / path)
    _check_modules(folder / MODULES_FILE, kinds)
    _check_transformer(folder)
    pooling: tuple[str, ...] = ()
    with_prompt = True
    if "Pooling" in folders:
        pooling_folder = folders["Pooling"]
        pooling, with_prompt = _pooling(pooling_folder / CONFIG_FILE)
    texts = read_text_settings(weights, settings)
    has_prompt = texts.post_prompt or texts.label_prompt
    if has_prompt and not with_prompt:
        raise unsupported(folder, "a prompt, and include_prompt=false in its pooling")
    steps = _read_steps(folder, modules)
    truncate_dim = texts.config.get("truncate_dim")
    if truncate_dim is not None:
        is_count = isinstance(truncate_dim, int) and truncate_dim >= 1
        if not is_count:
            raise unsupported(folder, f"truncate_dim={truncate_dim!r:.100}")

    identity = [
        *pooling,
        str(texts.max_tokens),
        str(texts.lower_case),
        texts.post_prompt,
    ]
    layers = []
    for step in steps:
        identity.append(step.identity)
        layers.append(step.module)
    if texts.label_prompt != texts.post_prompt:
        identity.append(f"label_prompt={texts.label_prompt}")
    if truncate_dim is not None:
        identity.append(f"truncate_dim={truncate_dim}")
    return Layout(
        pooling=pooling,
        static=folders.get("StaticEmbedding"),
        steps=tuple(layers),
        texts=texts,
        truncate_dim=truncate_dim,
        digest=digest(*identity),
    )


def _check_modules(file: Path, kinds: Sequence[str]) -> None:
    """Raise ModelError unless the modules are classes of sentence-transformers in an order that
    Feedmill runs.

    file: modules.json, which older models of model2vec lack. kinds: the class of each module,
    without its package.
    """
    entries = []
    if file.is_file():
        entries = read_json(file, list)
    names = set()
    for entry in entries:
        kind = str(entry.get("type", ""))
        if not kind.startswith(MODULES_PACKAGE):
            raise unsupported(
                file,
                f"the module {kind!r:.200}, which is not a class of sentence-transformers",
            )
        name = entry.get("name")
        names.add(str(name))
    if len(names) < len(entries):  # the library then runs only the last of them
        raise unsupported(file, "two modules of one name")
    for first in FIRST_MODULES:
        count = len(first)
        first_kinds = tuple(kinds[:count])
        later_kinds = kinds[count:]
        if first_kinds == first and LATER_MODULES.issuperset(later_kinds):
            return
    order = ", ".join(kinds) or "none"
    raise ModelError(
        f"{file} lists the modules {order:.500}. Feedmill runs Transformer and Pooling, or "
        "StaticEmbedding, and after them any sequence of Dense and Normalize. Use another model."
    )


def _check_transformer(folder: Path) -> None:
    """Raise ModelError if the transformer returns something else than a vector for each token."""
    config = read_text_config(folder)
    for name, usual in TRANSFORMER_OPTIONS.items():
        value = config.get(name)
        if value not in (None, usual):
            raise unsupported(
                folder,
                f"a transformer with {name}={value!r:.200}",
            )
    if config.get(TOKENIZER_OPTION):
        raise unsupported(
            folder,
            f"the tokenizer of another model ({TOKENIZER_OPTION})",
        )
    for name in PASSED_OPTIONS:
        options = config.get(name) or {}
        others = [options]
        if isinstance(options, dict):
            other_keys = set(options) - LOADING_KEYS
            others = sorted(other_keys)
        if others:
            other = str(others[0])
            raise unsupported(
                folder,
                f"a transformer with {printable(other):.100} in {name}",
            )


class _Step(NamedTuple):
    """A module that applies to pooled vectors. identity: tells it from all others in the layout's
    digest.
    """

    module: torch.nn.Module
    identity: str


class Normalize(torch.nn.Module):
    """Make vectors unit vectors: [rows, dimensions]."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return normalize(vectors, dim=-1)


def _read_steps(folder: Path, modules: Sequence[tuple[str, str]]) -> list[_Step]:
    """Return the modules that apply to pooled vectors, without normalisations at the end.

    Raises ModelError.
    """
    steps = []
    for kind, path in modules:
        module_folder = folder / path
        if kind == "Dense":
            dense = _dense(module_folder)
            steps.append(dense)
        elif kind == "Normalize":
            normalization = _normalize(module_folder)
            steps.append(normalization)
    while steps:
        last = steps[-1]
        if not isinstance(last.module, Normalize):
            break
        steps.pop()
    return steps


def unsupported(where: object, what: str) -> ModelError:
    """Return the error for a model that needs what Feedmill lacks."""
    return ModelError(f"{where} has {what}, which is not supported. Use another model.")


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class name, without its package, and the folder of each module; none if it has
    none.

    Raises ModelError.
    """
    modules_file = folder / MODULES_FILE
    if modules_file.exists():
        return files.read_modules(folder)
    # Older versions of model2vec wrote no modules.json.
    config = _read_if_there(folder / CONFIG_FILE)
    architectures = config.get("architectures") or ()
    if MODEL2VEC in architectures:
        return [("StaticEmbedding", "")]
    return []


def is_static(weights: Weights) -> bool:
    """Return whether a model has static embeddings instead of a transformer. Raises ModelError."""
    modules = read_modules(weights.folder)
    kinds = [kind for kind, _ in modules]
    return "StaticEmbedding" in kinds


def read_text_settings(weights: Weights, settings: Settings) -> TextSettings:
    """Read how the model reads a text.

    A folder without the files of sentence-transformers has the defaults.

    Raises ModelError, or SettingsError if the model lacks a prompt that the settings name.
    """
    folder = weights.folder
    text_config = read_text_config(folder)
    config = read_sentence_config(folder)
    max_tokens = text_config.get("max_seq_length")
    if not isinstance(max_tokens, int) or max_tokens <= 0:
        max_tokens = None
    return TextSettings(
        max_tokens=max_tokens,
        lower_case=bool(text_config.get("do_lower_case")),
        post_prompt=_prompt("post_prompt", settings.post_prompt, config),
        label_prompt=_prompt("label_prompt", settings.label_prompt, config),
        config=config,
    )


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return the content of the first of TEXT_CONFIGS; empty if there is none.

    Raises ModelError.
    """
    for name in TEXT_CONFIGS:
        file = folder / name
        if file.is_file():
            return _read_if_there(file)
    return {}


def _prompt(setting: str, chosen: str | None, config: dict[str, Any]) -> str:
    """Return the text of the chosen prompt, or of the model's default if none is chosen.

    Raises SettingsError.
    """
    prompts = config.get("prompts") or {}
    if chosen is None:
        name = config.get("default_prompt_name") or ""
        default = prompts.get(name) or ""
        return str(default)
    if chosen in prompts:
        prompt = prompts[chosen] or ""
        return str(prompt)
    if chosen == NO_PROMPT:
        return ""
    if PROMPT_NAME.fullmatch(chosen):
        names = "it has none"
        if prompts:
            listing = ", ".join(prompts)
            names = f"it has {listing}"
        variable = f"{PREFIX}{setting.upper()}"
        example = f"{chosen}: "
        raise SettingsError(
            f"{variable}: the model has no prompt named {chosen!r}; {names}. Set a "
            f"name that it has, or a text with its final space, such as {example!r}."
        )
    return chosen


def read_sentence_config(folder: Path) -> dict[str, Any]:
    """Return the content of config_sentence_transformers.json; empty if there is none.

    Raises ModelError.
    """
    return _read_if_there(folder / "config_sentence_transformers.json")


def _pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the pooling modes, and whether the prompt's tokens are pooled too."""
    config = read_json(path)
    modes = config.get("pooling_mode")
    if isinstance(modes, str):
        modes = (modes,)
    if not modes:
        modes = []
        for name, mode in LEGACY_POOLING_KEYS.items():
            if config.get(name):
                modes.append(mode)
    if not modes:
        modes = ("mean",)
    modes = tuple(modes)
    for mode in modes:
        if mode not in POOLINGS:
            raise unsupported(path, f"pooling_mode={mode!r:.200}")
    count = len(modes)
    if count > len(POOLINGS):
        raise unsupported(path, f"{count:,} pooling modes")
    with_prompt = config.get("include_prompt", True)
    return modes, bool(with_prompt)


def _dense(folder: Path) -> _Step:
    """Return a dense layer with its activation."""
    config_file = folder / CONFIG_FILE
    config = read_json(config_file)
    function = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    function = str(function)
    _check_ends(config_file, config)
    if config.get("use_residual"):
        raise unsupported(config_file, "use_residual")
    path = folder / WEIGHTS_FILE
    with loading(f"the dense layer in {path}"):
        # Without memory, until the file, whose size is known to fit, has the shapes that the
        # configuration claims.
        with torch.device("meta"):
            linear = torch.nn.Linear(
                config["in_features"],
                config["out_features"],
                bool(config.get("bias", True)),
            )
        file = TensorFile(path)
        tensors = {}
        for name in file.places:
            own_name = name.removeprefix("linear.")
            stored = file.read(name)
            tensors[own_name] = stored.float()
        linear.load_state_dict(tensors, assign=True)
        layer = torch.nn.Sequential(
            linear,
            activation(function, folder),
        )
        return _Step(
            module=layer.eval(),
            identity=f"{sha256_of(path)} {function}",
        )


def _normalize(folder: Path) -> _Step:
    """Return a normalisation, whose folder may lack a configuration."""
    file = folder / CONFIG_FILE
    # With an empty path, the folder is the model's own, and the file the transformer's.
    is_models_folder = (folder / MODULES_FILE).is_file()
    if file.is_file() and not is_models_folder:
        config = read_json(file)
        _check_ends(file, config)
    return _Step(Normalize(), identity="normalize")


def _check_ends(file: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError unless a module reads and writes the pooled vector."""
    for end in ("module_input_name", "module_output_name"):
        if config.get(end) not in (None, SENTENCE_EMBEDDING):
            raise unsupported(
                file,
                f"an input or output other than {SENTENCE_EMBEDDING}",
            )


def activation(path: str, folder: Path) -> torch.nn.Module:
    """Return torch.nn's activation of a class path, such as torch.nn.modules.activation.GELU.
    Raises ModelError.
    """
    _, _, name = path.rpartition(".")
    with loading(f"the activation {path:.200} of {folder}", "Use another model."):
        # A class outside torch runs its own code; torch.nn's class of the same name would not
        # replace it.
        if not path.startswith("torch."):
            raise ValueError("it is not a class of torch")
        # Nothing would load the weights of other modules. Of activations, PReLU has one, an
        # unknown tensor that the linear layer refuses, and MultiheadAttention needs arguments.
        if name not in torch.nn.modules.activation.__all__ and name != "Identity":
            raise ValueError("it is no activation of torch.nn")
        activation_class = getattr(torch.nn, name)
        module: torch.nn.Module = activation_class()
        return module


def _read_if_there(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is none, or if it is no object.

    Raises ModelError.
    """
    if not path.is_file():
        return {}
    content = read_json(path, object)
    if isinstance(content, dict):
        return content
    return {}
