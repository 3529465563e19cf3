"""Zero-shot classification with a reranker: how relevant is the sentence "This post is about food." to the post?

Works with cross-encoders of one logit. The post is the pair's first text (the query of a reranker), the label's
sentence the second. Logits equal those of sentence-transformers' CrossEncoder:

- single-label, several labels: softmax of the logits over the labels;
- `multi_label`, or only one label: the activation in the model's configuration, by default the sigmoid, as in
  `CrossEncoder.predict`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shared.errors import ModelError
from shared.settings import Settings
from workers.models.classifiers.layout import read_text_settings
from workers.models.classifiers.pairs import PairClassifier
from workers.models.device import Device
from workers.models.engines.network import read_config
from workers.models.weights import Weights

#: Supported activations, by class name without the package.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda logits: logits,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}
#: Label that transformers gives the only class of a model without named labels.
UNNAMED_LABEL = "LABEL_0"


class Reranker(PairClassifier):
    """Classify with a reranker. Raises ModelError if the folder does not hold one."""

    kind = "rerank"
    default_template = "This post is about {}."

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        texts = read_text_settings(weights, settings)
        super().__init__(weights, device, settings, min(settings.max_tokens, texts.max_tokens or settings.max_tokens))
        config = read_config(weights, settings.trust_remote_code)
        if config.num_labels != 1:
            raise ModelError(
                f"{weights.name} has {config.num_labels} labels, but a reranker has one. Set another "
                "FEEDMILL_CLASSIFIER, or use another model."
            )
        if self._tokenizer.has_chat_template:
            raise ModelError(
                f"{weights.name} formats pairs with a chat template, which is not supported. Use another model."
            )
        self.prompt, self.lower_case = texts.post_prompt, texts.lower_case
        name = _activation(texts.config, config.to_dict())
        if name not in ACTIVATIONS:
            raise ModelError(
                f"{weights.name} has an unsupported activation_fn: {name}. Use a model with one of: "
                f"{', '.join(ACTIVATIONS)}."
            )
        self._activate = ACTIVATIONS[name]
        self._serve(settings, name, texts.lower_case, repr(texts.post_prompt))

    def _scores(self, logits: torch.Tensor, independent: bool) -> torch.Tensor:
        return self._activate(logits[:, 0]) if independent else logits[:, 0].softmax(0)


def is_reranker(config: Mapping[str, Any], sentence_config: Mapping[str, Any]) -> bool:
    """Return whether a sequence classifier is a reranker: has one label, and this label no meaning.

    config: its config.json. sentence_config: its config_sentence_transformers.json, if any. A model that was saved by
    CrossEncoder is a reranker whatever its label is called. A regression model predicts a number about a single text.
    """
    names = list((config.get("id2label") or {}).values())
    if (len(names) or config.get("num_labels")) != 1:
        return False
    saved_by = (config.get("sentence_transformers"), config.get("sbert_ce_default_activation_function"))
    if any(saved_by) or sentence_config.get("model_type") == "CrossEncoder":
        return True
    return names in ([], [UNNAMED_LABEL]) and config.get("problem_type") != "regression"


def _activation(sentence_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of the activation's class, from the first place in which CrossEncoder would find one."""
    path = (
        sentence_config.get("activation_fn")
        or (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
        or "Sigmoid"
    )
    return str(path).rpartition(".")[2]
