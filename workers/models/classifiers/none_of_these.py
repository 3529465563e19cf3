"""None of these: scores that also say whether a post fits any label.

Compared with each other alone, one of the labels always wins. Here they also compete with everyday
subjects (subjects.toml): a post about pets is nearer to "pets" than to any of "delivery, refund,
praise". A label's score is its probability among labels and subjects, so that the scores of a
post's labels sum to less than 1, and the rest is the probability of "none of these".

Subjects near a label are left out, because posts of the label would resemble them. A label is near
to some subject of any list, so that "near" is measured by the label's own cosines: 1.5 standard
deviations above their mean. A stricter rule (1) costs labels with descriptions up to 0.01 of the
area under the ROC curve, a laxer one (2.5) costs bare names up to 0.02. Measured with 3, 6 and 10
of sixteen topics as labels, on 1,600 posts (docs/models.md).
"""

import math
import tomllib
from functools import cache
from pathlib import Path

import torch

from feedmill.shared.messages import digest

SUBJECTS_FILE = Path(__file__).with_name("subjects.toml")
#: Standard deviations above the mean of a label's cosines with all subjects from which a subject
#: is left out.
NEAR_LABEL = 1.5
#: Prior probability of a subject, in that of a label. All subjects together count as about ten
#: labels. It calibrates the scores: 0.08 has the lowest log loss of 0.03, 0.05, 0.08, 0.14 and
#: 0.22, while 0.14 keeps an asked precision of 0.9 better (87 to 92% right, instead of 84 to 91%).
SUBJECT_WEIGHT = 0.1


@cache
def read_subjects() -> dict[str, tuple[str, ...]]:
    """Return the texts of each subject: its name and its description."""
    text = SUBJECTS_FILE.read_text(encoding="utf-8")
    descriptions: dict[str, str] = tomllib.loads(text)
    return {name: (name, described) for name, described in descriptions.items()}


@cache
def method() -> str:
    """Return a digest of everything here that determines scores."""
    text = SUBJECTS_FILE.read_text(encoding="utf-8")
    return digest(text, str(NEAR_LABEL), str(SUBJECT_WEIGHT))


def apart(label_vectors: torch.Tensor, subject_vectors: torch.Tensor) -> torch.Tensor:
    """Return the unit vectors of the subjects that are not near a label: [subjects apart,
    dimensions].

    label_vectors, subject_vectors: unit vectors, [labels, dimensions], [subjects, dimensions].
    """
    cosines = label_vectors @ subject_vectors.T  # [labels, subjects]
    means = cosines.mean(1, keepdim=True)
    deviations = cosines.std(1, keepdim=True, correction=0)
    limits = means + NEAR_LABEL * deviations
    is_near = (cosines > limits).any(0)  # [subjects]
    return subject_vectors[~is_near]


def fitting_scores(
    label_logits: torch.Tensor, subject_logits: torch.Tensor
) -> torch.Tensor:
    """Return each label's probability among labels and subjects: [rows, labels].

    label_logits: [rows, labels]. subject_logits: [rows, subjects], which may be none.
    """
    weighted_subjects = subject_logits + math.log(SUBJECT_WEIGHT)
    logits = torch.cat([label_logits, weighted_subjects], dim=1)
    shares = logits.softmax(-1)
    labels = label_logits.shape[1]
    return shares[:, :labels]
