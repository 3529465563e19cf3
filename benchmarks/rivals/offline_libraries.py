"""Rivals without a queue: a library classifies the whole list in this process.

These rivals neither wait for messages nor acknowledge or store anything, so they do less work than
Feedmill. They show the libraries' throughput on the same posts.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoTokenizer, FeatureExtractionPipeline, pipeline

from benchmarks.rivals import BATCH_SIZE, BenchmarkJob, NotInstalled
from benchmarks.rivals.plain_model import (
    SCALE,
    cores,
    label_names,
    label_vectors,
    mean_pooled,
)
from feedmill.shared.messages import Post
from feedmill.workers.models.weights import locate


class MeanPooling(FeatureExtractionPipeline):
    """transformers' feature extraction with the pooling of the model's card, applied to a whole
    batch at a time.
    """

    def _forward(self, *args: Any, **_: Any) -> Any:
        (inputs,) = args
        return {
            "embedding": mean_pooled(
                self.model(**inputs).last_hidden_state, inputs["attention_mask"]
            )
        }

    def postprocess(self, *args: Any, **_: Any) -> torch.Tensor:
        (outputs,) = args
        embedding: torch.Tensor = outputs["embedding"][0]
        return embedding


class OfflineLibrary(ABC):
    """A classifier that embeds posts and gives each the label with the nearest description."""

    def __init__(self, job: BenchmarkJob) -> None:
        self._job = job
        self._folder = locate(job.settings.model).folder
        self._names = label_names(job.settings)
        self._model: Any = None
        self._labels: list[str] = []

    @abstractmethod
    def load(self) -> Any:
        """Load the model with the library."""

    @abstractmethod
    def embed(self, texts: list[str]) -> torch.Tensor:
        """Return the texts' unit vectors [texts, dimensions], in order."""

    def start(self) -> None:
        torch.set_num_threads(cores())
        self._model = self.load()
        self._label_vectors = label_vectors(self._job.settings, self.embed)

    def run(self, posts: Sequence[Post]) -> None:
        vectors = self.embed([post.text for post in posts]).float()
        scores = (SCALE * vectors @ self._label_vectors.T).softmax(-1)
        self._labels = [self._names[best] for best in scores.argmax(-1).tolist()]

    def labels(self) -> list[str]:
        return self._labels

    def stop(self) -> None:
        self._model = None
        gc.collect()


class Pipeline32(OfflineLibrary):
    """transformers' pipeline at batch size 32: posts in arrival order, padded to the longest of
    the batch.
    """

    def load(self) -> Any:
        return pipeline(
            "feature-extraction",
            model=str(self._folder),
            tokenizer=AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True
            ),
            dtype=self._job.device.dtype,
            device=self._job.device.torch,
            batch_size=BATCH_SIZE,
            pipeline_class=MeanPooling,
        )

    def embed(self, texts: list[str]) -> torch.Tensor:
        limits = {"truncation": True, "max_length": self._job.settings.max_tokens}
        return torch.stack(self._model(texts, tokenize_kwargs=limits))


class SentenceTransformers(OfflineLibrary):
    """sentence-transformers' `encode`, which sorts the list by length first.

    Raises NotInstalled.
    """

    def __init__(self, job: BenchmarkJob) -> None:
        if not find_spec("sentence_transformers"):
            raise NotInstalled(
                "Left out: sentence_transformers. Install it with `pip install "
                "sentence-transformers`."
            )
        super().__init__(job)

    def load(self) -> Any:
        # Imported here, because the library is not a dependency of Feedmill and takes seconds to
        # import.
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415

        model = SentenceTransformer(
            str(self._folder),
            device=self._job.device.name,
            model_kwargs={"dtype": self._job.device.dtype},
            local_files_only=True,
        )
        model.max_seq_length = self._job.settings.max_tokens
        return model

    def embed(self, texts: list[str]) -> torch.Tensor:
        vectors: torch.Tensor = self._model.encode(
            texts,
            batch_size=BATCH_SIZE,
            normalize_embeddings=True,
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        return vectors
