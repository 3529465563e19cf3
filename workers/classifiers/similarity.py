"""Zero-shot by embedding: a post belongs to the label whose sentence lies nearest to it.

Post and label ("This post is about food.") are embedded by one sentence-transformers model; the cosine of
their embeddings says how near they are. With several labels of which one is wanted the cosines become
probabilities, softmax(20 · cosine): all-MiniLM-L6-v2 was trained on exactly that distribution, with that scale
(its model card, "Fine-tuning"). With `multi_label`, or with one label, each score is the cosine itself.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from shared.errors import ModelError
from shared.messages import ClassifyOptions, digest
from shared.settings import Settings
from workers.classifiers import LabelSet, Row, Scores
from workers.device import Device
from workers.engines.torch_engine import Outputs, TorchEngine, device_errors
from workers.weights import Weights

#: The scale that the model's training multiplied cosines with.
SCALE = 20.0
#: Label sets kept; a message with another one pays a forward pass for its labels.
LABEL_SETS = 64
#: Labels embedded in one forward pass: a large label set must not need more memory than a micro-batch.
LABELS_AT_ONCE = 32


class Similarity:
    """The classifier of the embedded default model.

    Raises ModelError when the folder holds no sentence-transformers model with mean or CLS pooling.
    """

    def __init__(self, weights: Weights, device: Device, settings: Settings) -> None:
        self.weights = weights
        self.device = device
        self._settings = settings
        self._pools_first_token = _pooling(weights) == "cls"
        self._engine = TorchEngine(weights, device, compiled=settings.compile)
        self._max_tokens = min(
            settings.max_tokens, _max_tokens(weights) or settings.max_tokens, self._engine.max_tokens
        )
        self._engine.tokenizer.enable_truncation(self._max_tokens)
        self._label_sets: OrderedDict[str, LabelSet] = OrderedDict()

    def warm_up(self) -> None:
        rows = self.prepare(["A first post."], self.label_set(ClassifyOptions()))
        self.forward(rows[0])

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        described = options.labels or self._settings.labels
        template = options.template or self._settings.template
        multi_label = options.multi_label
        key = json.dumps([described, template, multi_label])
        if key not in self._label_sets:
            recipe = digest("similarity", self.weights.sha256, str(self._max_tokens), key)
            tokens = self._tokenize([template.replace("{}", description) for description in described.values()])
            self._label_sets[key] = LabelSet(tuple(described), multi_label, recipe, tokens)
            if len(self._label_sets) > LABEL_SETS:
                self._label_sets.popitem(last=False)
        self._label_sets.move_to_end(key)
        return self._label_sets[key]

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        return [[Row(tokens, label_set)] for tokens in self._tokenize(texts)]

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._engine.tokenizer.encode_batch_fast(list(texts))]

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Outputs:
        """Scores [rows, most labels of any row] in float32; unused places of shorter label sets are 0."""
        with device_errors():
            began = self._engine.begin()
            embeddings = self._embed([row.tokens for row in rows])
            by_label_set: dict[LabelSet, list[int]] = {}
            for index, row in enumerate(rows):
                by_label_set.setdefault(row.label_set, []).append(index)
            if len(by_label_set) == 1:
                scores = self._scores(embeddings, rows[0].label_set)
            else:
                scores = embeddings.new_zeros(len(rows), max(len(label_set.labels) for label_set in by_label_set))
                for label_set, indices in by_label_set.items():
                    members = self._engine.to_device(torch.tensor(indices))
                    scores[members, : len(label_set.labels)] = self._scores(embeddings[members], label_set)
            return Outputs(scores, began)

    def _scores(self, embeddings: torch.Tensor, label_set: LabelSet) -> torch.Tensor:
        """[rows, labels] of one label set."""
        if label_set.on_device is None:
            labels, at_once = label_set.tokens, LABELS_AT_ONCE
            pieces = [self._embed(labels[at : at + at_once]) for at in range(0, len(labels), at_once)]
            label_set.on_device = torch.cat(pieces)
        cosines: torch.Tensor = embeddings @ label_set.on_device.T
        independent = label_set.multi_label or len(label_set.labels) == 1
        return cosines if independent else (SCALE * cosines).softmax(-1)

    def _embed(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Unit vectors [rows, dimensions] in float32."""
        hidden = self._engine.forward(rows)
        # The mean's divisor only scales the vector, and the norm takes the scale out again.
        return normalize(hidden.first() if self._pools_first_token else hidden.sums(), dim=-1)

    def finish(self, rows: Sequence[Row], outputs: Outputs) -> list[tuple[Row, Scores]]:
        return [
            (row, dict(zip(row.label_set.labels, scores, strict=False)))
            for row, scores in zip(rows, outputs.wait().tolist(), strict=True)
        ]


def _pooling(weights: Weights) -> str:
    """How the model pools token embeddings: mean or cls."""
    modules = weights.folder / "modules.json"
    if modules.is_file():
        kinds = {str(module.get("type", "")).rpartition(".")[2] for module in _json(modules)}
        if odd := kinds - {"Transformer", "Pooling", "Normalize"}:
            raise ModelError(f"{modules} has a module {odd.pop()}, which is not supported yet.")
    path = weights.folder / "1_Pooling" / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{weights.folder} is no sentence-transformers model: it has no 1_Pooling/config.json. "
            "Classifying by similarity needs one."
        )
    modes = _json(path)
    for mode, name in (("pooling_mode_mean_tokens", "mean"), ("pooling_mode_cls_token", "cls")):
        if modes.get(mode):
            return name
    raise ModelError(f"{path} asks for a pooling other than mean or cls, which is not supported yet.")


def _max_tokens(weights: Weights) -> int | None:
    """The length that the model was made for, special tokens included, where its folder says so."""
    path = weights.folder / "sentence_bert_config.json"
    return _json(path).get("max_seq_length") if path.is_file() else None


def _json(path: Path) -> Any:
    """Raises ModelError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
