"""Select the classifier for a model: from the model's files, or from the `classifier` setting (built-in or plug-in).

A model that was just loaded scores canary posts, so that a broken one never takes a message. Half precision can
overflow: the scores are then not finite, or the same for every post.
"""

import logging
import math
from collections.abc import Callable
from functools import partial

import torch

from feedmill.shared import linux
from feedmill.shared.errors import DeviceFull, ModelError, RequestRefused, SettingsError, UserError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import PREFIX, Settings
from feedmill.workers.models.classifiers import Classifier, Scores
from feedmill.workers.models.classifiers.layout import is_static, read_modules, read_sentence_config
from feedmill.workers.models.classifiers.pairs import entailment_class, is_reranker
from feedmill.workers.models.device import Device, has_bfloat16
from feedmill.workers.models.plugins import load_plugin
from feedmill.workers.models.weights import (
    CONFIG_FILE,
    GLICLASS,
    HEAD_FILE,
    SETFIT_CONFIG,
    SETFIT_HEAD,
    Weights,
    loading,
    locate,
    parameters,
    read_config_file,
)

#: Memory that a forward pass needs in addition, as a share of the weights' memory (a lower bound).
MEMORY_MARGIN = 0.1
#: Built-in classifiers, imported only when a model needs them: the imports of GLiClass take a second.
CLASSIFIERS = {
    "gliclass": "feedmill.workers.models.classifiers.gliclass:Gliclass",
    "head": "feedmill.workers.models.classifiers.fixed_labels:Head",
    "nli": "feedmill.workers.models.classifiers.pairs:Entailment",
    "rerank": "feedmill.workers.models.classifiers.pairs:Reranker",
    "sequence": "feedmill.workers.models.classifiers.fixed_labels:SequenceClassifier",
    "similarity": "feedmill.workers.models.classifiers.similarity:Similarity",
}
#: Classifiers whose models have labels of their own.
WITH_FIXED_LABELS = ("head", "sequence")
logger = logging.getLogger(__name__)

#: Short and long, plain and unusual posts. A model must score every label of each.
CANARY_POSTS = (
    "A first post.",
    "The keeper saved two penalties\n\nand nobody in the stadium could believe it",
    "¿Qué? 🙂 <b>&amp;</b> https://example.org/?a=b " + "x" * 200,
    "no",
)
#: Labels to score if each label is a row, so that a large label set does not delay the start.
CANARY_LABELS = 2
#: Decimal places in which scores of different posts must differ.
PLACES = 6


def load_classifier(settings: Settings, device: Device) -> Classifier:
    """Load the configured model's classifier, in the precision that the model needs, and score the canary posts.

    Raises ModelError or SettingsError.
    """
    weights, kind = _located(settings)
    device = device.for_model(read_config_file(weights), settings.engine)
    if device.automatic and is_static(weights):
        device = device._replace(dtype=torch.float32, dtype_reason="half precision does not speed up static embeddings")
    check_size(weights, device)
    make = load_plugin(CLASSIFIERS.get(kind, kind), f"{PREFIX}CLASSIFIER")
    if kind not in CLASSIFIERS:  # a plug-in: its results must not be mistaken for a built-in classifier's
        weights = weights._replace(name=kind)
    try:
        classifier: Classifier = make(weights, device, settings)
        scores = check_scores(classifier)
    except UserError:
        raise
    except RequestRefused as refused:
        raise SettingsError(
            f"{weights.name} cannot serve the configured labels or template: {refused}. Change "
            "FEEDMILL_LABELS or FEEDMILL_TEMPLATE, or use another model."
        ) from None
    except Exception as error:  # loading and a first forward pass can fail in any way
        first = str(error).partition("\n")[0]
        raise ModelError(
            f"{weights.name} does not run on {device.name} ({type(error).__name__}: {first:.300}). Use another model, "
            "FEEDMILL_DEVICE or FEEDMILL_DTYPE."
        ) from error
    if kind in CLASSIFIERS:  # a plug-in's scores may be the same by design
        check_differences(scores, classifier, partial(_in_float32, make, weights, settings))
    return classifier


def _in_float32(make: Callable[..., Classifier], weights: Weights, settings: Settings) -> Classifier:
    """Load the model a second time, in float32 and in the machine's memory, where there is more of it."""
    device = Device(torch.device("cpu"), torch.float32, "for comparison")
    check_size(weights, device)
    return make(weights, device, settings)


def _located(settings: Settings) -> tuple[Weights, str]:
    """Return the configured model's files and its classifier. Raises ModelError."""
    weights = locate(settings.model, settings.revision, settings.trust_remote_code)
    return weights, classifier_kind(weights) if settings.classifier == "auto" else settings.classifier


def kind_of(settings: Settings) -> str:
    """Return the configured model's classifier. Raises ModelError."""
    return _located(settings)[1]


def usable_settings(settings: Settings) -> Settings:
    """Return the settings without those that their model's classifier cannot use. Raises ModelError."""
    fixed = kind_of(settings) in WITH_FIXED_LABELS
    return settings.model_copy(update={"labels": None, "template": None}) if fixed else settings


def classifier_kind(weights: Weights) -> str:
    """Return gliclass, head, nli, rerank, sequence or similarity. Raises ModelError if the files match none of them."""
    config = read_config_file(weights)
    if (weights.folder / HEAD_FILE).is_file():
        return "head"
    if any((weights.folder / name).is_file() for name in (SETFIT_HEAD, SETFIT_CONFIG)):
        raise ModelError(
            f"{weights.name} is a SetFit model, whose head is a pickle ({SETFIT_HEAD}), which can run any code when "
            "loaded. Train a head on the same examples with `feedmill train --head --from EXAMPLES --base FOLDER`."
        )
    with loading(weights.folder / CONFIG_FILE):
        names = [str(name) for name in config.get("architectures") or ()]
        labels = {str(name): int(place) for name, place in (config.get("label2id") or {}).items()}
        sentence_config = read_sentence_config(weights.folder)
        reranks = is_reranker(config, sentence_config)
    if config.get("model_type") == GLICLASS or any(name.startswith(GLICLASS) for name in names):
        return "gliclass"
    if any(name.endswith("ForSequenceClassification") for name in names):
        if entailment_class(labels) is not None:
            return "nli"
        return "rerank" if reranks else "sequence"
    embeds = sentence_config.get("model_type", "SentenceTransformer") == "SentenceTransformer"
    if embeds and read_modules(weights.folder):
        return "similarity"
    raise ModelError(
        f"{weights.name} is not a classification model: config.json lists {', '.join(names) or 'no architecture'}, "
        "but a …ForSequenceClassification architecture or a sentence-transformers model is required. Use a conversion "
        "to it, or another model, or set FEEDMILL_CLASSIFIER."
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


def check_scores(classifier: Classifier) -> list[Scores]:
    """Return the scores of the canary posts. Raises ModelError unless every label has a finite score.

    Other errors of the classifier propagate: RequestRefused if it cannot serve the configured labels.
    """
    label_set = classifier.label_set(ClassifyOptions())
    each_a_row = label_set.rows > 1 and not hasattr(classifier, "fixed_labels")
    if each_a_row and len(label_set.labels) > CANARY_LABELS:
        label_set = classifier.label_set(ClassifyOptions.parse({"labels": list(label_set.labels[:CANARY_LABELS])}))
    rows = [row for of_post in classifier.prepare(CANARY_POSTS, label_set) for row in of_post]
    found = [scores for _, scores in classifier.finish(rows, classifier.forward(rows))]
    name, device = classifier.weights.name, classifier.device
    for scores in found:
        if set(scores) != set(label_set.labels):
            raise ModelError(f"{name} gives no scores for some labels: {scores!r:.200}. Use another model.")
        if not all(map(math.isfinite, scores.values())):
            raise ModelError(f"{name} gives scores that are not finite in {device.precision}. {_advice(device)}")
    return found


def check_differences(found: list[Scores], classifier: Classifier, in_float32: Callable[[], Classifier]) -> None:
    """Raise ModelError if all posts have the same scores in half precision, but not in float32.

    A model may have the same scores for posts as different as these: one that was trained to find something rare, for
    example. in_float32: load the model in float32; called only if all scores are the same.
    """
    if not _all_alike(found):
        return
    name, device = classifier.weights.name, classifier.device
    if device.dtype != torch.float32:
        try:
            precise = check_scores(in_float32())
        except (ModelError, DeviceFull):  # for example without memory for it
            precise = None
        if precise is None or not _all_alike(precise):
            raise ModelError(f"{name} gives all posts the same scores in {device.precision}. {_advice(device)}")
    logger.warning("%s gives all test posts the same scores, in float32, too: evaluate it before you use it", name)


def _all_alike(found: list[Scores]) -> bool:
    return len({tuple(round(score, PLACES) for score in scores.values()) for scores in found}) == 1


def _advice(device: Device) -> str:
    """Return a sentence that names the precision to try."""
    if device.dtype == torch.float32:
        return "Use another model."
    wider = "bfloat16" if device.dtype == torch.float16 and has_bfloat16(device.torch) else "float32"
    return f"Set FEEDMILL_DTYPE={wider}."
