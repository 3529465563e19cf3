"""Static embeddings: equal to sentence-transformers' and model2vec's, without a transformer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    StaticEmbedding,
)
from tokenizers import Tokenizer

from feedmill.shared.errors import ModelError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import Settings
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.classifiers.similarity import Similarity
from tests.fakes import models
from tests.fakes.models import FP32
from tests.support import naming

TEXTS = [
    "The keeper saved two penalties in the match.",
    "What should I try? My laptop will not boot!",
    "unknownword 🙃 food",
    "sports " * 100,
    "🙃",
    "",
]
DIMENSIONS = 16


def save_static(
    folder: Path, tokenizer: Tokenizer, dense: int = 0, **config: Any
) -> Path:
    """Save random static embeddings as sentence-transformers does, with a dense layer of `dense`
    dimensions.
    """
    torch.manual_seed(7)
    table = torch.randn(tokenizer.get_vocab_size(), DIMENSIONS)
    modules: list[Any] = [StaticEmbedding(tokenizer, embedding_weights=table)]
    modules += [Dense(DIMENSIONS, dense)] if dense else []
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu").save(
        str(folder), create_model_card=False
    )
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def save_model2vec(folder: Path, tokenizer: Tokenizer, shared: int = 0) -> Path:
    """Save random embeddings as model2vec does. shared: vectors to share between all tokens; 0 for
    one each.
    """
    torch.manual_seed(7)
    size = tokenizer.get_vocab_size()
    tensors = {"embeddings": torch.randn(shared or size, DIMENSIONS)}
    if shared:
        tensors |= {"mapping": torch.arange(size) % shared, "weights": torch.rand(size)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "normalize": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    module = {
        "idx": 0,
        "name": "0",
        "path": ".",
        "type": "sentence_transformers.models.StaticEmbedding",
    }
    (folder / "modules.json").write_text(json.dumps([module]))
    return folder


def load(folder: Path, **settings: Any) -> Similarity:
    loaded = load_classifier(
        Settings(model=str(folder), max_tokens=512, **settings), FP32
    )
    assert isinstance(loaded, Similarity)
    return loaded


def embed(classifier: Similarity, texts: list[str]) -> torch.Tensor:
    rows = [
        rows[0]
        for rows in classifier.prepare(texts, classifier.label_set(ClassifyOptions()))
    ]
    assert min(row.length for row in rows) > 0
    with torch.inference_mode():
        return classifier.embed([row.tokens for row in rows])


@pytest.mark.parametrize(
    "make_tokenizer", [models._bert, models._bart, models._unigram]
)
@pytest.mark.parametrize(
    ("dense", "config"),
    [
        (0, {}),
        (
            8,
            {
                "prompts": {"topic": "The match. "},
                "default_prompt_name": "topic",
                "truncate_dim": 5,
            },
        ),
    ],
)
def test_embeddings_match_sentence_transformers(
    tmp_path: Path, make_tokenizer: Any, dense: int, config: dict[str, Any]
) -> None:
    folder = save_static(tmp_path / "model", make_tokenizer(), dense, **config)
    library = SentenceTransformer(str(folder), device="cpu")
    expected = library.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    assert torch.allclose(embed(load(folder), TEXTS), expected, atol=1e-5)


def test_reads_tables_in_a_folder_of_their_own(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "model", models._bert())
    expected = embed(load(folder), TEXTS)
    part = folder / "0_StaticEmbedding"
    part.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.move(folder / name, part)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = part.name
    (folder / "modules.json").write_text(json.dumps(modules))
    assert torch.equal(embed(load(folder), TEXTS), expected)


@pytest.mark.parametrize("shared", [0, 20])
def test_model2vec_folders_match_sentence_transformers(
    tmp_path: Path, shared: int
) -> None:
    folder = save_model2vec(tmp_path / "model", models._bert(), shared)
    known = ["The match ended in a draw.", "food", "sports music, travel"]
    library = SentenceTransformer(str(folder), device="cpu")
    expected = library.encode(known, convert_to_tensor=True, normalize_embeddings=True)
    found = embed(load(folder), known)
    assert torch.allclose(found, expected, atol=1e-5)
    (folder / "modules.json").unlink()  # which older versions did not write
    assert torch.equal(embed(load(folder), known), found)


@pytest.mark.parametrize(
    ("make_tokenizer", "text"),
    [(models._bert, "food 🙃 sports"), (models._unigram, "food🙃 sports")],
)
def test_model2vec_folders_leave_out_unknown_tokens(
    tmp_path: Path, make_tokenizer: Any, text: str
) -> None:
    """As model2vec does; sentence-transformers averages them, too."""
    classifier = load(save_model2vec(tmp_path / "model", make_tokenizer()))
    found = embed(classifier, [text, "food sports", ""])
    assert torch.equal(found[0], found[1])
    assert not found[2].any()
    averaged = embed(
        load(save_static(tmp_path / "other", make_tokenizer())), [text, "food sports"]
    )
    assert not torch.allclose(averaged[0], averaged[1], atol=1e-3)


def test_rejects_unusable_tables(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "model", models._bert())
    path = folder / "model.safetensors"
    table = load_file(path)["embedding.weight"]
    for tensors, named in (
        ({"weight": table}, "embedding.weight"),
        ({"embedding.weight": table[:-1].contiguous()}, f"{len(table) - 1:,}"),
        ({"embeddings": table, "mapping": torch.tensor([len(table)])}, path.name),
    ):
        save_file(tensors, path)
        with pytest.raises(ModelError, match=naming(folder, named)):
            load(folder)
    save_file({"embedding.weight": table}, path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load(folder)
