"""What is computed of a post, in three verbs: prepare, forward, finish.

`similarity.py`, `nli.py` and `sequence.py` are three ways; `choose.py` reads off a model's files which is its own.

A classifier turns texts into token rows (`prepare`, on the tokenizer thread), runs one micro-batch of
rows of any posts and label sets (`forward`, on the device thread), and turns the outputs into scores
(`finish`, on the writer thread). It knows nothing of messages, Celery or Redis.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.messages import ClassifyOptions, digest
from workers.device import Device
from workers.tokenizer import Tokens
from workers.weights import Weights

#: Each label's score, in the label set's order.
Scores = dict[str, float]
#: What stands for each label in the template.
Descriptions = Mapping[str, Sequence[str]]
#: Label sets kept; a message with another one pays for preparing its labels.
LABEL_SETS = 64


@dataclass(eq=False, slots=True)
class LabelSet:
    """Labels with the template they are put into; prepared once, then shared by every row that asks for it."""

    labels: tuple[str, ...]
    multi_label: bool
    #: Digest of all that, with the post, decides the scores: see `shared.messages.fingerprint`.
    recipe: str
    #: Rows that each post is.
    rows: int = 1
    #: The labels as the classifier's model reads them; its own affair.
    prepared: Any = field(default=None, repr=False)
    #: What the classifier keeps of them on the device; filled on the device thread, by the first batch.
    on_device: Any = field(default=None, repr=False)


@dataclass(eq=False, slots=True)
class Row:
    """One row of a forward pass."""

    tokens: Tokens
    label_set: LabelSet
    #: Whose row it is; set and read by whoever asked for it.
    owner: Any = None

    @property
    def length(self) -> int:
        return len(self.tokens.ids)


class LabelSets:
    """The label sets of messages that bring labels of their own, prepared once each.

    kind, model: what decides the scores besides labels and texts: the classifier, and a digest of its model and limits.
    row_each: whether a post is a row for each label.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        labels: Descriptions,
        template: str,
        prepare: Callable[[Sequence[Sequence[str]]], Any],
        row_each: bool = False,
    ) -> None:
        self._kind, self._model = kind, model
        self._labels, self._template = labels, template
        self._prepare = prepare
        self._row_each = row_each
        self._known: OrderedDict[str, LabelSet] = OrderedDict()

    def of(self, options: ClassifyOptions) -> LabelSet:
        """The label set that the options ask for. Raises what `prepare` does, which is given each label's sentences."""
        labels: Descriptions = options.labels or self._labels
        template = options.template or self._template
        key = json.dumps([list(labels.items()), template, options.multi_label])
        if key not in self._known:
            sentences = [[template.replace("{}", text) for text in described] for described in labels.values()]
            recipe = digest(self._kind, self._model, key)
            rows = len(labels) if self._row_each else 1
            self._known[key] = LabelSet(tuple(labels), options.multi_label, recipe, rows, self._prepare(sentences))
            if len(self._known) > LABEL_SETS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


class Outputs(Protocol):
    """What a forward pass left, perhaps still on its way from the device."""

    def ready(self) -> bool:
        """Whether the device is done; never waits."""

    @property
    def seconds(self) -> float:
        """For how long the device was at it; to be asked when it is done."""


class Classifier(Protocol):
    """What the pipeline asks of a classifier."""

    #: nli, sequence or similarity.
    kind: str
    weights: Weights
    device: Device
    #: Whether its engine computes nothing for padding.
    packed: bool

    def warm_up(self) -> None:
        """Run one forward pass, so that the first message does not pay for what the first pass sets up."""

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        """The label set of a message, cached. Raises RequestRefused when the model cannot serve it."""

    def prepare(self, texts: Sequence[str], label_set: LabelSet) -> list[list[Row]]:
        """Each text's rows."""

    def forward(self, rows: Sequence[Row]) -> Outputs:
        """Run one micro-batch; returns as soon as the device has it. Device thread only.

        Raises DeviceFull, DeviceLost, or whatever a row brings about that the model cannot compute.
        """

    def finish(self, rows: Sequence[Row], outputs: Any) -> list[tuple[Row, Scores]]:
        """Wait for the device; the scores of each post whose last row is among `rows`, with that row.

        Raises DeviceLost.
        """
