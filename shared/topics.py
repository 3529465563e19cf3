"""The sixteen default topics: labels for messages that name none.

Embedding models need several descriptions per label, because a label's name alone says too little about its posts. The
descriptions were chosen on one half of a set of real posts and measured on the other half; see DECISIONS.md. NLI models
use the names alone, like transformers' pipeline.
"""

import json
from pathlib import Path

#: Topic -> its descriptions. The file is one of labels, as users write them (shared/settings.py).
DESCRIBED_TOPICS: dict[str, tuple[str, ...]] = {
    topic: tuple(texts) for topic, texts in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")).items()
}
TOPICS = tuple(DESCRIBED_TOPICS)
