"""Shortlist labels: keep the k labels nearest to a post, so that a classifier with a row per label scores only these.

An embedding model (similarity.py) chooses them while posts are prepared: it embeds a post once, whatever the number of
labels.
"""

from collections.abc import Sequence

import torch

from shared.errors import DeviceFull, ModelError
from shared.messages import ClassifyOptions, digest
from shared.settings import PREFIX, Settings
from workers.models.classifiers import LabelSet, Row, canary
from workers.models.classifiers.similarity import SENTENCE_BATCH_SIZE, Similarity
from workers.models.device import Device
from workers.models.weights import locate


class Shortlist:
    """The embedding model `shortlist_model`, and the number of labels that it keeps, `shortlist`.

    Its sentences are labels and descriptions in the default template of `similarity`, with the model's own prompts.
    Raises ModelError if the model is not an embedding model, or gives wrong scores.
    """

    def __init__(self, size: int, settings: Settings, device: Device) -> None:
        self.size = size
        of_classifier = ("template", "post_prompt", "label_prompt", "truncate_dim", "revision")
        own = dict.fromkeys(of_classifier) | {"model": settings.shortlist_model, "compile": False}
        own_settings = settings.model_copy(update=own)
        try:
            weights = locate(own_settings.model, offline=settings.offline)
            self._similarity = Similarity(weights, device, own_settings)
            canary.check_scores(self._similarity)
        except ModelError as error:
            raise ModelError(f"{PREFIX}SHORTLIST_MODEL: {error}") from error
        any_labels = self.label_set(ClassifyOptions.parse({"labels": ["a", "b"]}))
        #: Digest of everything that determines which labels are kept, except the labels.
        self.identity = digest(str(size), any_labels.recipe)

    def label_set(self, options: ClassifyOptions) -> LabelSet:
        """Return the labels as `choose` needs them."""
        return self._similarity.label_set(options.model_copy(update={"template": None, "multi_label": True}))

    def choose(self, texts: Sequence[str], label_set: LabelSet) -> list[list[int]]:
        """Return the places of each text's nearest labels, in the order of the label set. Raises DeviceLost."""
        self._similarity.device.take_share(self._similarity.device.lanes)
        rows = [row for (row,) in self._similarity.prepare(texts, label_set)]
        chosen: list[list[int]] = [[]] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda place: rows[place].length)
        for start in range(0, len(rows), SENTENCE_BATCH_SIZE):
            batch = by_length[start : start + SENTENCE_BATCH_SIZE]
            nearest = self._scores([rows[place] for place in batch]).topk(self.size).indices.sort().values
            for place, labels in zip(batch, nearest.tolist(), strict=True):
                chosen[place] = labels
        return chosen

    def _scores(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return cosines, [rows, labels], from as many forward passes as the device's memory needs."""
        try:
            return self._similarity.forward(rows).wait()
        except DeviceFull:
            if len(rows) == 1:
                raise
            half = len(rows) // 2
            return torch.cat((self._scores(rows[:half]), self._scores(rows[half:])))
