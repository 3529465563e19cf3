"""Select the classifier for a model: from the model's files, or from the `classifier` setting (built-in or plug-in)."""

from collections.abc import Callable
from functools import partial

import torch

from shared import linux
from shared.errors import ModelError, RequestRefused, SettingsError, clause
from shared.settings import PREFIX, Settings
from workers.models.classifiers import Classifier, canary
from workers.models.classifiers.layout import is_model2vec, is_static, read_sentence_config
from workers.models.classifiers.nli import entailment_class
from workers.models.classifiers.rerank import is_reranker
from workers.models.device import Device
from workers.models.plugins import load_plugin
from workers.models.weights import (
    CONFIG_FILE,
    GLICLASS,
    HEAD_FILE,
    MODULES_FILE,
    SETFIT_CONFIG,
    SETFIT_HEAD,
    Weights,
    locate,
    parameters,
    read_config_file,
    setfit_error,
)

#: Memory that a forward pass needs in addition, as a share of the weights' memory (a lower bound).
MEMORY_MARGIN = 0.1
#: Built-in classifiers, imported only when a model needs them: the imports of GLiClass take a second.
CLASSIFIERS = {
    "gliclass": "workers.models.classifiers.gliclass:Gliclass",
    "head": "workers.models.classifiers.head:Head",
    "nli": "workers.models.classifiers.nli:Entailment",
    "rerank": "workers.models.classifiers.rerank:Reranker",
    "sequence": "workers.models.classifiers.sequence:SequenceClassifier",
    "similarity": "workers.models.classifiers.similarity:Similarity",
}
#: Classifiers whose models have labels of their own.
WITH_FIXED_LABELS = ("head", "sequence")
#: Settings that only some built-in classifiers use.
USED_BY = {
    "post_prompt": ("rerank", "similarity"),
    "label_prompt": ("similarity",),
    "truncate_dim": ("similarity",),
}


def load_classifier(settings: Settings, device: Device) -> Classifier:
    """Load the configured model's classifier, in the precision that the model needs, and score the canary posts.

    Raises ModelError or SettingsError.
    """
    weights = locate(settings.model, settings.revision, settings.offline, settings.trust_remote_code)
    kind = classifier_kind(weights) if settings.classifier == "auto" else settings.classifier
    device = device.for_model(read_config_file(weights), settings.engine)
    if device.automatic and is_static(weights):
        device = device._replace(dtype=torch.float32, dtype_reason="half precision does not speed up static embeddings")
    check_size(weights, device)
    for setting in unused_settings(kind):
        if getattr(settings, setting) is not None:
            name = f"{PREFIX}{setting.upper()}"
            raise SettingsError(f"{name} is set, but has no effect on {weights.name}, a {kind} model: unset {name}.")
    make = load_plugin(CLASSIFIERS.get(kind, kind), "classifier")
    if kind not in CLASSIFIERS:  # a plug-in: its results must not be mistaken for a built-in classifier's
        weights = weights._replace(name=kind)
    classifier: Classifier = make(weights, device, settings)
    try:
        classifier.warm_up()
        scores = canary.check_scores(classifier)
    except ModelError:
        raise
    except RequestRefused as refused:
        raise SettingsError(
            f"{weights.name} cannot serve the configured labels or template: {refused}. Change "
            "FEEDMILL_LABELS or FEEDMILL_TEMPLATE, or use another model."
        ) from None
    except Exception as error:  # a first forward pass can fail in any way
        first = str(error).partition("\n")[0]
        raise ModelError(
            f"{weights.name} does not run on {device.name} ({type(error).__name__}: {first:.300}). Use another model, "
            "FEEDMILL_DEVICE or FEEDMILL_DTYPE."
        ) from error
    if kind in CLASSIFIERS:  # a plug-in's scores may be the same by design
        canary.check_differences(scores, classifier, partial(_in_float32, make, weights, settings))
    return classifier


def unused_settings(kind: str) -> list[str]:
    """Return the settings that must be unset for a classifier."""
    return [setting for setting, kinds in USED_BY.items() if kind in CLASSIFIERS and kind not in kinds]


def _in_float32(make: Callable[..., Classifier], weights: Weights, settings: Settings) -> Classifier:
    """Load the model a second time, in float32 and in the machine's memory, where there is more of it."""
    device = Device(torch.device("cpu"), torch.float32, "for comparison")
    check_size(weights, device)
    return make(weights, device, settings)


def classifier_kind(weights: Weights) -> str:
    """Return gliclass, head, nli, rerank, sequence or similarity. Raises ModelError if the files match none of them."""
    config = read_config_file(weights)
    if (weights.folder / HEAD_FILE).is_file():
        return "head"
    if any((weights.folder / name).is_file() for name in (SETFIT_HEAD, SETFIT_CONFIG)):
        raise setfit_error(weights.name)
    try:
        names = [str(name) for name in config.get("architectures") or ()]
        labels = {str(name): int(place) for name, place in (config.get("label2id") or {}).items()}
        sentence_config = read_sentence_config(weights.folder)
        reranks = is_reranker(config, sentence_config)
    except (ValueError, AttributeError, TypeError) as error:
        raise ModelError(
            f"Cannot read {weights.folder / CONFIG_FILE}: {clause(error)}. Download the model again."
        ) from None
    if config.get("model_type") == GLICLASS or any(name.startswith(GLICLASS) for name in names):
        return "gliclass"
    if any(name.endswith("ForSequenceClassification") for name in names):
        if entailment_class(labels) is not None:
            return "nli"
        return "rerank" if reranks else "sequence"
    embeds = sentence_config.get("model_type", "SentenceTransformer") == "SentenceTransformer"
    if (embeds and (weights.folder / MODULES_FILE).is_file()) or is_model2vec(config):
        return "similarity"
    if any(name.endswith("ForCausalLM") for name in names):
        raise ModelError(
            f"{weights.name} is a language model ({', '.join(names)}). Rerankers that answer yes or no as text are not "
            "supported: use one that was converted to …ForSequenceClassification with one label, or another model."
        )
    raise ModelError(
        f"{weights.name} is not a classification model: config.json lists {', '.join(names) or 'no architecture'}, "
        "but a …ForSequenceClassification architecture or a sentence-transformers model is required. Choose another "
        "model, or set FEEDMILL_CLASSIFIER."
    )


def check_size(weights: Weights, device: Device) -> None:
    """Raise ModelError if the model does not fit the device's free memory. A model runs on a single device."""
    bytes_each = {torch.float16: 2, torch.bfloat16: 2}.get(device.dtype, 4)
    needed = int(parameters(weights) * bytes_each * (1 + MEMORY_MARGIN))
    available = _memory(device)
    if needed > available:
        raise ModelError(
            f"{weights.name} needs {needed / 1e9:.1f} GB in {device.precision}, but {device.name} has "
            f"{available / 1e9:.1f} GB free. Use a smaller model, or half precision (FEEDMILL_DTYPE)."
        )


def _memory(device: Device) -> int:
    """Return the device's free memory in bytes, or the machine's total memory if free memory is unknown."""
    if device.torch.type == "cuda":
        return int(torch.cuda.mem_get_info(device.torch)[0])
    return linux.available_memory()
