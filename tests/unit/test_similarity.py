"""workers/models/classifiers/similarity.py on the real weights, compared with the model card's
recipe.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from feedmill.shared.errors import ModelError
from feedmill.shared.messages import ClassifyOptions
from feedmill.shared.settings import EMBEDDED_MODEL, Settings
from feedmill.workers.models.classifiers import MAX_LABEL_SETS
from feedmill.workers.models.classifiers.similarity import COSINE_SCALE, Similarity
from feedmill.workers.models.weights import Weights, locate
from tests.fakes.models import (
    FP32,
    make_model,
    make_sentence_model,
    scores_of,
    write_modules,
)
from tests.support import long_cases, naming

TEXTS = [
    "The keeper saved two penalties and the crowd went home happy",
    "Slow-cooked beans, smoked paprika, a handful of parsley",
    "sourdough " * 400,
    "🙃",
]


@pytest.fixture(scope="module")
def classifier() -> Similarity:
    return Similarity(locate(EMBEDDED_MODEL), FP32, Settings())


def cosines(texts: list[str], sentences: list[str]) -> torch.Tensor:
    """Return cosines, shape [texts, sentences], by the model card's "Usage (HuggingFace
    Transformers)".
    """
    folder = locate(EMBEDDED_MODEL).folder
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )

    def embed(batch: list[str]) -> torch.Tensor:
        encoded = tokenizer(
            batch, padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.no_grad():
            tokens = model(**encoded)[0]
        mask = encoded["attention_mask"].unsqueeze(-1).expand(tokens.size()).float()
        mean = torch.sum(tokens * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
        return torch.nn.functional.normalize(mean, p=2, dim=1)

    return embed(texts) @ embed(sentences).T


def test_scores_match_the_model_cards_recipe(classifier: Similarity) -> None:
    labels = ["sports", "food", "music"]
    expected = cosines(TEXTS, [f"This post is about {label}." for label in labels])
    single = torch.tensor(
        [
            [s[label] for label in labels]
            for s in scores_of(classifier, TEXTS, labels=labels)
        ]
    )
    multi = scores_of(classifier, TEXTS, labels=labels, multi_label=True)
    assert torch.allclose(single, (COSINE_SCALE * expected).softmax(-1), atol=1e-5)
    assert torch.allclose(
        torch.tensor([[s[label] for label in labels] for s in multi]),
        expected,
        atol=1e-5,
    )


def test_label_sets_share_a_forward_pass(classifier: Similarity) -> None:
    sets = [
        classifier.label_set(ClassifyOptions.parse({"labels": labels}))
        for labels in ("sports,food", "music,tea,cars")
    ]
    rows = [
        classifier.prepare([text], label_set)[0][0]
        for text, label_set in zip(TEXTS, sets, strict=False)
    ]
    mixed = [found for _, found in classifier.finish(rows, classifier.forward(rows))]
    assert [list(found) for found in mixed] == [
        ["sports", "food"],
        ["music", "tea", "cars"],
    ]
    assert mixed[0] == pytest.approx(
        scores_of(classifier, TEXTS[:1], labels="sports,food")[0], abs=1e-5
    )
    assert mixed[1] == pytest.approx(
        scores_of(classifier, TEXTS[1:2], labels="music,tea,cars")[0], abs=1e-5
    )


def test_caches_a_bounded_number_of_label_sets(classifier: Similarity) -> None:
    first = classifier.label_set(ClassifyOptions.parse({"labels": "a"}))
    assert classifier.label_set(ClassifyOptions.parse({"labels": "a"})) is first
    recipes = {
        classifier.label_set(ClassifyOptions.parse(options)).recipe
        for options in (
            {"labels": "a"},
            {"labels": "b"},
            {"labels": "a", "template": "{}"},
            {"labels": "a", "multi_label": True},
        )
    }
    assert len(recipes) == 4
    for number in range(MAX_LABEL_SETS + 5):
        classifier.label_set(ClassifyOptions.parse({"labels": f"label {number}"}))
    assert classifier.label_set(ClassifyOptions.parse({"labels": "a"})) is not first


def test_truncates_texts_at_the_models_limit(classifier: Similarity) -> None:
    label_set = classifier.label_set(ClassifyOptions())
    assert classifier.prepare(["word " * 5000], label_set)[0][0].length == 256
    shorter = Similarity(locate(EMBEDDED_MODEL), FP32, Settings(max_tokens=16))
    assert shorter.prepare(["word " * 5000], label_set)[0][0].length == 16
    assert shorter.label_set(ClassifyOptions()).recipe != label_set.recipe


@pytest.mark.parametrize(
    "way", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_embeddings_match_sentence_transformers(tmp_path: Path, way: str) -> None:
    """Compare each pooling, in old and new configurations, with and without a dense layer and a
    prompt.
    """
    old = {
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
    name = old.get(
        way,
        "pooling_mode_"
        + (
            way
            if way.endswith("tokens")
            else f"{way}_token"
            if way == "cls"
            else f"{way}_tokens"
        ),
    )
    kinds: list[tuple[dict[str, object], int, str]] = [
        ({name: True, "pooling_mode_mean_tokens": way == "mean"}, 0, ""),
        ({"pooling_mode": way}, 16, "topic: "),
    ]
    for number, (pooling, dense, prompt) in enumerate(kinds):
        folder = make_sentence_model(
            tmp_path / str(number), pooling=pooling, dense=dense, prompt=prompt
        )
        ours = Similarity(Weights("m", folder, None, "00"), FP32, Settings())
        rows = [
            rows[0].tokens
            for rows in ours.prepare(TEXTS, ours.label_set(ClassifyOptions()))
        ]
        with torch.inference_mode():
            found = ours.embed(rows)
        library = SentenceTransformer(str(folder), device="cpu")
        expected = library.encode(
            TEXTS, convert_to_tensor=True, normalize_embeddings=True
        )
        assert torch.allclose(found, expected, atol=1e-5)


NORMALIZE: dict[str, Any] = {}
WIDE: dict[str, Any] = {"out_features": 48}
NARROW: dict[str, Any] = {
    "out_features": 8,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}


@pytest.mark.parametrize(
    "later",
    [
        (),
        (WIDE, NARROW, NORMALIZE),
        (NORMALIZE, WIDE, NORMALIZE, NARROW, NORMALIZE, WIDE),
        *long_cases(
            (NORMALIZE,),
            (NORMALIZE, NORMALIZE),
            (NORMALIZE, WIDE),
            (NORMALIZE, WIDE, NORMALIZE),
            (WIDE, NORMALIZE, NARROW),
        ),
    ],
)
@pytest.mark.parametrize("truncate_dim", [None, 5])
def test_every_order_of_modules_matches_sentence_transformers(
    tmp_path: Path, later: tuple[dict[str, Any], ...], truncate_dim: int | None
) -> None:
    folder = write_modules(make_sentence_model(tmp_path), *later)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"truncate_dim": truncate_dim})
    )
    assert_embeddings_match(folder)


@pytest.mark.parametrize(
    "name",
    [
        "GELU",
        "Tanh",
        *long_cases("ELU", "Hardtanh", "LeakyReLU", "ReLU", "SiLU", "Sigmoid"),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_layers_match_sentence_transformers(
    tmp_path: Path, name: str, bias: bool
) -> None:
    dense = {
        "out_features": 16,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{name}",
    }
    assert_embeddings_match(
        write_modules(make_sentence_model(tmp_path), NORMALIZE, dense)
    )


def assert_embeddings_match(folder: Path) -> None:
    """Compare the embeddings of a folder with those of `encode`, as unit vectors."""
    ours = Similarity(Weights("m", folder, None, "00"), FP32, Settings())
    rows = [
        rows[0].tokens
        for rows in ours.prepare(TEXTS, ours.label_set(ClassifyOptions()))
    ]
    with torch.inference_mode():
        found = ours.embed(rows)
    library = SentenceTransformer(str(folder), device="cpu")
    expected = library.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    assert torch.allclose(found, expected, atol=1e-5)


def test_recipe_depends_on_the_order_of_modules(tmp_path: Path) -> None:
    """Normalization at the end changes no score, and elsewhere it does."""
    recipes = []
    folder = make_sentence_model(tmp_path)
    for later in (
        (WIDE,),
        (WIDE, NORMALIZE),
        (NORMALIZE, WIDE),
        (NORMALIZE, NORMALIZE, WIDE),
    ):
        write_modules(folder, *later)
        # The first dense layer's weights are the same in every sequence.
        classifier = Similarity(Weights("m", folder, None, "00"), FP32, Settings())
        recipes.append(classifier.label_set(ClassifyOptions()).recipe)
    assert recipes[0] == recipes[1]
    assert len(set(recipes)) == 3


PROMPTS = {
    "query": "search this: ",
    "document": None,
    "Retrieval-passage": "The match ended. ",
    "classification": "food ",
}


def prompted(folder: Path, **config: object) -> Path:
    """Save a model with prompts, a dense layer and a truncating configuration."""
    made = make_sentence_model(folder, dense=16)
    written = {"prompts": PROMPTS, "default_prompt_name": "query"} | config
    (made / "config_sentence_transformers.json").write_text(json.dumps(written))
    return made


@pytest.mark.parametrize("name", [*PROMPTS, None])
def test_prompts_by_name_match_sentence_transformers(
    tmp_path: Path, name: str | None
) -> None:
    """Compare the scores of prompts for posts and labels with the cosines of
    `encode(prompt_name=…)`.
    """
    folder, label_prompt = prompted(tmp_path, truncate_dim=8), "I baked "
    ours = Similarity(
        Weights("m", folder, None, "00"),
        FP32,
        Settings(post_prompt=name, label_prompt=label_prompt),
    )
    library = SentenceTransformer(str(folder), device="cpu")
    of_posts = library.encode(
        TEXTS, prompt_name=name, convert_to_tensor=True, normalize_embeddings=True
    )
    sentences = [f"This post is about {label}." for label in ("sports", "food")]
    of_labels = library.encode(
        sentences,
        prompt=label_prompt,
        convert_to_tensor=True,
        normalize_embeddings=True,
    )
    found = scores_of(ours, TEXTS, labels="sports,food", multi_label=True)
    assert of_posts.shape[1] == 8
    assert torch.allclose(
        torch.tensor([list(each.values()) for each in found]),
        of_posts @ of_labels.T,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["query", None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_generative_embedders_match_sentence_transformers(
    tmp_path: Path, side: str, name: str | None
) -> None:
    """Qwen3-Embedding reads the last token, and has a prompt for queries and none for
    documents.
    """
    folder = make_sentence_model(
        tmp_path,
        "qwen3",
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
    )
    make_model("qwen3", folder, padding_side=side)
    prompts = {
        "prompts": {"query": "Instruct: find the topic\nQuery:", "document": ""},
        "default_prompt_name": None,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    ours = Similarity(
        Weights("m", folder, None, "00"), FP32, Settings(post_prompt=name)
    )
    with torch.inference_mode():
        found = ours.embed(
            [
                rows[0].tokens
                for rows in ours.prepare(TEXTS, ours.label_set(ClassifyOptions()))
            ]
        )
    library = SentenceTransformer(str(folder), device="cpu")
    expected = library.encode(
        TEXTS, prompt_name=name, convert_to_tensor=True, normalize_embeddings=True
    )
    assert torch.allclose(found, expected, atol=1e-5)


def test_recipe_depends_on_prompts(tmp_path: Path) -> None:
    weights = Weights("m", prompted(tmp_path), None, "00")
    recipes = {}
    for name, options in {
        "default": {}, "named": {"post_prompt": "query"},
        "written": {"post_prompt": "search this: "},
        "both": {"post_prompt": "search this: ",
        "label_prompt": "query"}, "none": {"post_prompt": "none"},
        "label": {"label_prompt": "none"}, "other": {"post_prompt": "classification"},
    }.items():  # fmt: skip
        settings = Settings(**options)  # type: ignore[arg-type]
        recipes[name] = (
            Similarity(weights, FP32, settings).label_set(ClassifyOptions()).recipe
        )
    assert (
        recipes["default"] == recipes["named"] == recipes["written"] == recipes["both"]
    )
    assert len(set(recipes.values())) == len(recipes) - 3


def test_recipe_of_the_default_settings_is_stable(classifier: Similarity) -> None:
    """Stored results are found again by their recipe, so a default must not change it."""
    assert (
        classifier.label_set(ClassifyOptions()).recipe
        == "2cbd59be497812017a0c67b09a8a449c"
    )


def test_descriptions_of_a_label_are_averaged(classifier: Similarity) -> None:
    (found,) = scores_of(
        classifier, TEXTS[:1], labels={"a": ["sports", "matches"]}, multi_label=True
    )
    texts = ["This post is about sports.", "This post is about matches."]
    post, *described = cosines([TEXTS[0], *texts], [TEXTS[0], *texts])
    between = described[0][2]
    expected = (post[1] + post[2]) / torch.sqrt(2 + 2 * between)
    assert found["a"] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    "kinds",
    [
        ["Transformer", "Normalize"],
        ["Transformer", "Dense", "Pooling"],
        ["Transformer", "Normalize", "Pooling"],
        ["Transformer", "Pooling", "Pooling"],
        ["Transformer", "Transformer", "Pooling"],
        ["Transformer", "Pooling", "LayerNorm"],
        ["Pooling", "Transformer"],
        ["Pooling"],
        ["StaticEmbedding", "Pooling"],
        [],
    ],
)
def test_rejects_other_orders_of_modules(tmp_path: Path, kinds: list[str]) -> None:
    folder = make_sentence_model(tmp_path)
    modules = [
        {
            "name": str(place),
            "path": "1_Pooling" if kind == "Pooling" else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for place, kind in enumerate(kinds)
    ]
    assert_modules_are_rejected(folder, modules, kinds)


@pytest.mark.parametrize("change", [{"type": "custom_st.Pooling"}, {"name": "0"}])
def test_rejects_modules_that_the_library_reads_otherwise(
    tmp_path: Path, change: dict[str, str]
) -> None:
    """A class of another package may compute anything; of two modules of one name, the library
    runs the last.
    """
    folder = make_sentence_model(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1] |= change
    assert_modules_are_rejected(folder, modules, [])


def assert_modules_are_rejected(
    folder: Path, modules: list[dict[str, Any]], named: list[str]
) -> None:
    file = folder / "modules.json"
    file.write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=naming(file, *named)):
        Similarity(Weights("m", folder, None, "00"), FP32, Settings())


@pytest.mark.parametrize(
    "ends", [{"module_input_name": "token_embeddings"}, {"module_output_name": "other"}]
)
@pytest.mark.parametrize("kind", ["Dense", "Normalize"])
def test_rejects_modules_with_other_ends(
    tmp_path: Path, kind: str, ends: dict[str, str]
) -> None:
    folder = write_modules(make_sentence_model(tmp_path), WIDE, NORMALIZE)
    path = next(folder.glob(f"[0-9]_{kind}")) / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | ends))
    with pytest.raises(ModelError, match=naming(path)):
        Similarity(Weights("m", folder, None, "00"), FP32, Settings())


def test_rejects_transformers_with_another_task(tmp_path: Path) -> None:
    folder = make_sentence_model(tmp_path)
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"transformer_task": "fill-mask"})
    )
    with pytest.raises(ModelError, match=naming(folder, "fill-mask")):
        Similarity(Weights("m", folder, None, "00"), FP32, Settings())


@pytest.mark.parametrize(
    "options",
    [
        {"config_args": {"num_hidden_layers": 1}},
        {"config_kwargs": {"num_hidden_layers": 1}},
        {"processing_kwargs": {"text": {"max_length": 8}}},
        {"processor_kwargs": {"model_max_length": 8}},
        {"tokenizer_args": {"do_lower_case": True}},
        {"model_args": ["x"]},
        {"tokenizer_name_or_path": "bert-base-uncased"},
    ],
)
def test_rejects_options_that_change_what_a_transformer_computes(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_sentence_model(tmp_path)
    (folder / "sentence_bert_config.json").write_text(json.dumps(options))
    with pytest.raises(ModelError, match=naming(folder, next(iter(options)))):
        Similarity(Weights("m", folder, None, "00"), FP32, Settings())


def test_accepts_options_that_change_how_a_transformer_is_loaded(
    tmp_path: Path,
) -> None:
    folder = make_sentence_model(tmp_path)
    options = {
        "model_args": {"torch_dtype": "float32"},
        "config_args": {"trust_remote_code": True},
    }
    (folder / "sentence_bert_config.json").write_text(
        json.dumps(options | {"processing_kwargs": None})
    )
    assert (
        Similarity(Weights("m", folder, None, "00"), FP32, Settings()).kind
        == "similarity"
    )


@pytest.mark.parametrize("dimensions", [0, -4, 8.0, "8"])
def test_rejects_a_number_of_dimensions_that_cannot_be_kept(
    tmp_path: Path, dimensions: object
) -> None:
    folder = make_sentence_model(tmp_path)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"truncate_dim": dimensions})
    )
    with pytest.raises(
        ModelError, match=naming(folder, f"truncate_dim={dimensions!r}")
    ):
        Similarity(Weights("m", folder, None, "00"), FP32, Settings())


def test_rejects_unsupported_dense_layers(tmp_path: Path) -> None:
    folder = make_sentence_model(tmp_path, dense=32)
    path = folder / "2_Dense" / "config.json"
    for option in ({"use_residual": True}, {"module_input_name": "token_embeddings"}):
        path.write_text(json.dumps({"in_features": 32, "out_features": 32} | option))
        with pytest.raises(ModelError, match=naming(path)):
            Similarity(Weights("m", folder, None, "00"), FP32, Settings())
    # the library does not take torch's GELU for another one
    for function in ("own.Custom", "own.GELU"):
        path.write_text(
            json.dumps(
                {"in_features": 32, "out_features": 32, "activation_function": function}
            )
        )
        with pytest.raises(ModelError, match=function):
            Similarity(Weights("m", folder, None, "00"), FP32, Settings())
    path.write_text(json.dumps({"in_features": 32, "out_features": 32}))
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=naming("2_Dense", "model.safetensors")):
        Similarity(Weights("m", folder, None, "00"), FP32, Settings())
