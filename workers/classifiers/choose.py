"""Which classifier a model is for: read off its own files, unless the settings say, or name one of somebody's own."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from shared.errors import ModelError, RequestRefused, SettingsError
from shared.settings import Settings
from workers.classifiers import Classifier
from workers.classifiers.nli import Entailment, entailment_of
from workers.classifiers.sequence import SequenceClassifier
from workers.classifiers.similarity import Similarity
from workers.device import Device
from workers.plugins import plugin
from workers.weights import Weights, locate, parameters

#: What a forward pass needs besides the weights, at least, as a share of them.
MARGIN = 0.1
CLASSIFIERS: dict[str, type[Similarity] | type[Entailment] | type[SequenceClassifier]] = {
    classifier.kind: classifier for classifier in (Entailment, SequenceClassifier, Similarity)
}


def load_classifier(settings: Settings, device: Device) -> Classifier:
    """The classifier of the model that is set, loaded and tried. Raises ModelError or SettingsError."""
    weights = locate(settings.model, settings.revision, settings.offline, settings.trust_remote_code)
    kind = kind_of(weights) if settings.classifier == "auto" else settings.classifier
    check_size(weights, device)
    make = CLASSIFIERS.get(kind)
    if make is None:  # its results are its own, whatever it does with the weights
        make, weights = plugin(kind, "classifier"), weights._replace(name=kind)
    classifier: Classifier = make(weights, device, settings)
    try:
        classifier.warm_up()
    except RequestRefused as refused:
        raise SettingsError(f"{weights.name} cannot serve what is set: {refused}.") from None
    except Exception as error:  # whatever a first forward pass brings to light
        first = str(error).partition("\n")[0]
        raise ModelError(
            f"{weights.name} does not run on {device.name}: {type(error).__name__}: {first:.300}"
        ) from error
    return classifier


def kind_of(weights: Weights) -> str:
    """nli, sequence or similarity. Raises ModelError where the files tell of none of them."""
    path = weights.folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        names = [str(name) for name in config.get("architectures") or ()]
        labels = {str(name): int(place) for name, place in (config.get("label2id") or {}).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "sequence" if entailment_of(labels) is None else "nli"
    if (weights.folder / "modules.json").is_file():
        return "similarity"
    raise ModelError(
        f"{weights.name} is no model that classifies: its config.json names {', '.join(names) or 'no architecture'}, "
        "where …ForSequenceClassification is expected, and it is no sentence-transformers model. FEEDMILL_CLASSIFIER "
        "overrides this."
    )


def check_size(weights: Weights, device: Device) -> None:
    """Raises ModelError where the device has less memory than the model takes; one model is run on one device."""
    bytes_each = {torch.float16: 2, torch.bfloat16: 2}.get(device.dtype, 4)
    needed = int(parameters(weights) * bytes_each * (1 + MARGIN))
    there = _memory(device)
    if there is not None and needed > there:
        precision = str(device.dtype).removeprefix("torch.")
        raise ModelError(
            f"{weights.name} needs {needed / 1e9:.1f} GB in {precision}, and {device.name} has {there / 1e9:.1f} GB "
            "free: a model must fit one device. Take a smaller one, or half precision."
        )


def _memory(device: Device) -> int | None:
    """Free bytes on the device, where that can be told."""
    if device.torch.type == "cuda":
        return int(torch.cuda.mem_get_info(device.torch)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
