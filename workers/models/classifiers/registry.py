"""Select the classifier for a model: from the model's files, or from the `classifier` setting
(built-in or plug-in).

A model that was just loaded scores canary posts, so that a broken one never takes a message. Half
precision can overflow: the scores are then not finite, or the same for every post.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch

from feedmill.shared import linux
from feedmill.shared.errors import (
    DeviceFull,
    ModelError,
    RequestRefused,
    SettingsError,
    UserError,
    printable,
)
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import CLASSIFIERS, PREFIX, Settings
from feedmill.workers.models.classifiers import Classifier, Scores
from feedmill.workers.models.classifiers.layout import (
    is_static,
    read_modules,
    read_sentence_config,
)
from feedmill.workers.models.classifiers.pairs import entailment_class, is_reranker
from feedmill.workers.models.device import Device, has_bfloat16
from feedmill.workers.models.files import (
    CONFIG_FILE,
    HEAD_FILE,
    MAX_NAME,
    is_panic,
    loading,
)
from feedmill.workers.models.plugins import load_plugin
from feedmill.workers.models.weights import (
    GLICLASS,
    SETFIT_CONFIG,
    SETFIT_HEAD,
    Weights,
    check_loaded,
    locate,
    parameters,
    read_config_file,
)

#: Memory that a forward pass needs in addition, as a share of the weights' memory (a lower bound).
MEMORY_MARGIN = 0.1
#: Kind of model in config_sentence_transformers.json that scores pairs.
CROSS_ENCODER = "CrossEncoder"
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


def load_classifier(
    settings: Settings, device: Device, accept: Callable[[Weights], None] | None = None
) -> Classifier:
    """Load the configured model's classifier, in the precision that the model needs, and score the
    canary posts.

    accept: called with the model's weights and their digest, before anything is loaded; it may
    raise ModelError. Raises ModelError or SettingsError.
    """

    def check(located: Weights) -> None:
        check_size(located, _device_for(located, device, settings))

    weights = _locate(settings, check)
    if accept is not None:
        accept(weights)
    kind = _kind(weights, settings)
    model_device = _device_for(weights, device, settings)
    classifier_class = load_plugin(CLASSIFIERS.get(kind, kind), f"{PREFIX}CLASSIFIER")
    # a plug-in: its results must not be mistaken for a built-in classifier's
    if kind not in CLASSIFIERS:
        weights = weights._replace(name=kind)
    with _explain_failures(weights, model_device):
        classifier: Classifier = classifier_class(weights, model_device, settings)
        scores = canary_scores(classifier)
    if kind in CLASSIFIERS:  # a plug-in's scores may be the same by design
        in_float32 = partial(_in_float32, classifier_class, weights, settings)
        check_differences(scores, classifier, in_float32)
    check_loaded(weights)
    return classifier


@contextmanager
def _explain_failures(weights: Weights, device: Device) -> Iterator[None]:
    """Raise ModelError, or SettingsError, for every failure to load a model and to score the
    canary posts.
    """
    try:
        yield
    except UserError:
        raise
    except RequestRefused as refused:
        raise SettingsError(
            f"{weights.name} cannot serve the configured labels or template: {refused}. Change "
            "FEEDMILL_LABELS or FEEDMILL_TEMPLATE, or use another model."
        ) from None
    # Loading and a first forward pass can fail in any way.
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        first_line, _, _ = str(error).partition("\n")
        reason = printable(first_line)
        raise ModelError(
            f"{weights.name} does not run on {device.name} ({type(error).__name__}: "
            f"{reason:.300}). Use another model, FEEDMILL_DEVICE or FEEDMILL_DTYPE."
        ) from error


def _device_for(weights: Weights, device: Device, settings: Settings) -> Device:
    """Return the device in the precision that the model needs. Raises ModelError."""
    device = device.for_model(read_config_file(weights), settings.engine)
    if device.automatic and is_static(weights):
        return device._replace(
            dtype=torch.float32,
            dtype_reason=("half precision does not speed up static embeddings"),
        )
    return device


def _in_float32(
    classifier_class: Callable[..., Classifier], weights: Weights, settings: Settings
) -> Classifier:
    """Load the model a second time, in float32 and in the machine's memory, where there is more of
    it.
    """
    device = Device(torch.device("cpu"), torch.float32, "for comparison")
    check_size(weights, device)
    return classifier_class(weights, device, settings)


def _locate(
    settings: Settings, check: Callable[[Weights], None] | None = None
) -> Weights:
    """Return the configured model's files. check: see `locate`. Raises ModelError."""
    return locate(settings.model, settings.revision, settings.trust_remote_code, check)


def _kind(weights: Weights, settings: Settings) -> str:
    """Return the classifier of a model: the configured one, or the one for its files.

    Raises ModelError.
    """
    if settings.classifier == "auto":
        return classifier_kind(weights)
    return settings.classifier


def kind_of(settings: Settings) -> str:
    """Return the configured model's classifier. Raises ModelError."""
    return _kind(_locate(settings), settings)


def usable_settings(settings: Settings) -> Settings:
    """Return the settings without those that their model's classifier cannot use.

    Raises ModelError.
    """
    if kind_of(settings) in WITH_FIXED_LABELS:
        return settings.model_copy(update={"labels": None, "template": None})
    return settings


def classifier_kind(weights: Weights) -> str:
    """Return the built-in classifier that a model's files need: a name in CLASSIFIERS.

    Raises ModelError if they match none.
    """
    config = read_config_file(weights)
    if (weights.folder / HEAD_FILE).is_file():
        return "head"
    _check_no_setfit(weights)
    with loading(weights.folder / CONFIG_FILE):
        architectures = config.get("architectures") or ()
        names = [str(name) for name in architectures]
        label2id = config.get("label2id") or {}
        labels = {}
        for name, number in label2id.items():
            labels[str(name)] = int(number)
        modules = [kind for kind, _ in read_modules(weights.folder)]
        sentence_config = read_sentence_config(weights.folder)
        reranks = is_reranker(config, sentence_config)
    has_gliclass_name = any(name.startswith(GLICLASS) for name in names)
    if config.get("model_type") == GLICLASS or has_gliclass_name:
        return "gliclass"
    sentence_model = sentence_config.get("model_type", "SentenceTransformer")
    has_other_modules = any(kind != "Transformer" for kind in modules)
    if sentence_model == CROSS_ENCODER and has_other_modules:
        raise ModelError(
            f"{weights.name} is a cross-encoder of several modules ({', '.join(modules)}), which "
            "is not supported. Use a conversion to a …ForSequenceClassification architecture, "
            "which needs the transformer alone."
        )
    if any(name.endswith("ForSequenceClassification") for name in names):
        if entailment_class(labels) is not None:
            return "nli"
        if reranks:
            return "rerank"
        return "sequence"
    if sentence_model == "SentenceTransformer" and modules:
        return "similarity"
    listed = printable(", ".join(names))[:MAX_NAME]
    raise ModelError(
        f"{weights.name} is not a classification model: config.json lists "
        f"{listed or 'no architecture'}, but a …ForSequenceClassification architecture or a "
        "sentence-transformers model is required. Use a conversion to it, or another model, or "
        "set FEEDMILL_CLASSIFIER."
    )


def _check_no_setfit(weights: Weights) -> None:
    """Raise ModelError for a SetFit model: nothing here loads a pickle."""
    for name in (SETFIT_HEAD, SETFIT_CONFIG):
        if (weights.folder / name).is_file():
            raise ModelError(
                f"{weights.name} is a SetFit model, whose head is a pickle ({SETFIT_HEAD}), which "
                "can run any code when loaded. Train a head on the same examples with `feedmill "
                "train --head --from EXAMPLES --base FOLDER`."
            )


def check_size(weights: Weights, device: Device) -> None:
    """Raise ModelError if the model does not fit the device's free memory."""
    parameter_bytes = 4
    if device.dtype in (torch.float16, torch.bfloat16):
        parameter_bytes = 2
    weights_bytes = parameters(weights) * parameter_bytes
    needed = int(weights_bytes * (1 + MEMORY_MARGIN))
    available = _memory(device)
    if needed > available:
        raise ModelError(
            f"{weights.name} needs {needed / 1e9:.1f} GB in {device.precision}, but {device.name} "
            f"has {available / 1e9:.1f} GB free. Use a smaller model, half precision "
            "(FEEDMILL_DTYPE), or several GPUs (FEEDMILL_DEVICE=cuda:0+1)."
        )


def _memory(device: Device) -> int:
    """Return the device's free memory in bytes, or the machine's total memory if free memory is
    unknown.
    """
    if device.torch.type != "cuda":
        return linux.available_memory()
    memory = 0
    for gpu in device.all:
        free, _ = torch.cuda.mem_get_info(gpu)
        memory += int(free)
    return memory


def canary_scores(classifier: Classifier) -> list[Scores]:
    """Return the scores of the canary posts.

    Raises ModelError unless every label has a finite score.

    Other errors of the classifier propagate: RequestRefused if it cannot serve the configured
    labels.
    """
    label_set = classifier.label_set(ClassifyOptions())
    has_fixed_labels = hasattr(classifier, "fixed_labels")
    each_a_row = label_set.rows > 1 and not has_fixed_labels
    if each_a_row and len(label_set.labels) > CANARY_LABELS:
        few_labels = label_set.labels[:CANARY_LABELS]
        options = ClassifyOptions.parse({"labels": list(few_labels)})
        label_set = classifier.label_set(options)
    rows_by_post = classifier.prepare(CANARY_POSTS, label_set)
    rows = list(chain.from_iterable(rows_by_post))
    outputs = classifier.forward(rows)
    all_scores = [scores for _, scores in classifier.finish(rows, outputs)]
    name = classifier.weights.name
    device = classifier.device
    for scores in all_scores:
        if set(scores) != set(label_set.labels):
            raise ModelError(
                f"{name} gives no scores for some labels: {scores!r:.200}. Use another model."
            )
        if not all(map(math.isfinite, scores.values())):
            raise ModelError(
                f"{name} gives scores that are not finite in {device.precision}. {_advice(device)}"
            )
    return all_scores


def check_differences(
    found: list[Scores], classifier: Classifier, in_float32: Callable[[], Classifier]
) -> None:
    """Raise ModelError if all posts have the same scores in half precision, but not in float32.

    A model may have the same scores for posts as different as these: one that was trained to find
    something rare, for example. in_float32: load the model in float32; called only if all scores
    are the same.
    """
    if not _all_alike(found):
        return
    name = classifier.weights.name
    device = classifier.device
    if device.dtype != torch.float32:
        try:
            precise = canary_scores(in_float32())
        except (ModelError, DeviceFull):  # for example without memory for it
            precise = None
        if precise is None or not _all_alike(precise):
            raise ModelError(
                f"{name} gives all posts the same scores in {device.precision}. {_advice(device)}"
            )
    logger.warning(
        (
            "%s gives all test posts the same scores, in float32, too: evaluate it before "
            "you use it"
        ),
        name,
    )


def _all_alike(all_scores: list[Scores]) -> bool:
    rounded_scores = set()
    for scores in all_scores:
        numbers = (round(score, PLACES) for score in scores.values())
        rounded_scores.add(tuple(numbers))
    return len(rounded_scores) == 1


def _advice(device: Device) -> str:
    """Return a sentence that names the precision to try."""
    if device.dtype == torch.float32:
        return "Use another model."
    wider = "float32"
    if device.dtype == torch.float16 and has_bfloat16(device.torch):
        wider = "bfloat16"
    return f"Set FEEDMILL_DTYPE={wider}."
