"""workers/models/files.py, tensors.py and bounds.py: model folders whose files leave it, are
endless, lie or change.
"""

import json
import os
import shutil
import struct
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from feedmill.shared.errors import ModelError
from feedmill.shared.settings import Settings
from feedmill.workers.models.bounds import MAX_TENSORS
from feedmill.workers.models.classifiers import registry
from feedmill.workers.models.classifiers.registry import load_classifier
from feedmill.workers.models.files import (
    ModelFile,
    _stamp,
    check_unchanged,
    with_digests,
)
from feedmill.workers.models.tokenizer import Tokenizer
from feedmill.workers.models.weights import Weights, locate
from tests.fakes.models import FP32, make_model, make_sentence_model, scores_of
from tests.support import naming

TEXTS = ["The match ended in a draw after a late penalty.", "food"]
LABELS = {0: "a", 1: "b"}


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentence_model(tmp_path_factory.mktemp("sentences"), dense=8)


@pytest.fixture(scope="module")
def tuned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("distilbert", tmp_path_factory.mktemp("tuned"), LABELS)


def copied(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into, symlinks=True)
    return into


def changed(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | values))


def load(folder: Path) -> Any:
    return load_classifier(
        Settings(
            model=str(folder), labels="food,sports" if is_zero_shot(folder) else None
        ),
        FP32,
    )


def is_zero_shot(folder: Path) -> bool:
    return (folder / "modules.json").exists()


def with_other_pooling(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_cls_token": True})
    )


def with_other_dense(folder: Path) -> None:
    file = folder / "2_Dense" / "model.safetensors"
    save_file({name: -2 * values for name, values in load_file(file).items()}, file)


def with_other_activation(folder: Path) -> None:
    changed(
        folder / "2_Dense" / "config.json",
        activation_function="torch.nn.modules.activation.ReLU",
    )


def with_shorter_texts(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 4, "do_lower_case": True})
    )


def with_other_tokens(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["match"], vocabulary["penalty"] = (
        vocabulary["penalty"],
        vocabulary["match"],
    )
    (folder / "tokenizer.json").write_text(json.dumps(content))


def with_a_prompt(folder: Path) -> None:
    prompts = {"prompts": {"p": "penalty "}, "default_prompt_name": "p"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def with_other_eps(folder: Path) -> None:
    changed(folder / "config.json", layer_norm_eps=0.5)


@pytest.mark.parametrize(
    "change",
    [
        with_other_pooling,
        with_other_dense,
        with_other_activation,
        with_shorter_texts,
        with_other_tokens,
        with_a_prompt,
        with_other_eps,
    ],
)
def test_every_file_that_decides_a_score_changes_the_digest(
    sentence_model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    assert locate(str(folder)).sha256 == locate(str(sentence_model)).sha256, (
        "the path is no part of it"
    )
    before = scores_of(load(folder), TEXTS)
    change(folder)
    assert scores_of(load(folder), TEXTS) != before
    assert locate(str(folder)).sha256 != locate(str(sentence_model)).sha256


def test_digest_leaves_out_files_that_no_load_reads(
    sentence_model: Path, tmp_path: Path
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    for name in (
        "README.md",
        "training.json",
        "trainer_state.json",
        "optimizer.pt",
        ".gitattributes",
    ):
        (folder / name).write_bytes(os.urandom(64))
    assert locate(str(folder)).sha256 == locate(str(sentence_model)).sha256


def test_static_embeddings_are_identified_by_the_table_that_is_loaded(
    sentence_model: Path, tmp_path: Path
) -> None:
    """Also if the folder has weights of a transformer, which nothing reads."""
    folder = copied(sentence_model, tmp_path / "model")
    part = folder / "0_StaticEmbedding"
    part.mkdir()
    shutil.copy(folder / "tokenizer.json", part)
    tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    save_file({"embedding.weight": torch.randn(tokens, 32)}, part / "model.safetensors")
    kind = "sentence_transformers.models.StaticEmbedding"
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": part.name, "type": kind}])
    )
    before = locate(str(folder))
    assert before.files[0] == part / "model.safetensors"
    save_file({"embedding.weight": torch.randn(tokens, 32)}, part / "model.safetensors")
    assert locate(str(folder)).sha256 != before.sha256


def test_loads_only_the_weights_that_were_hashed(
    tuned_model: Path, tmp_path: Path
) -> None:
    """transformers would prefer the shards of a distributed checkpoint to model.safetensors."""
    folder = copied(tuned_model, tmp_path / "model")
    before = scores_of(load(folder), TEXTS)
    others = {
        name: -values
        for name, values in load_file(folder / "model.safetensors").items()
    }
    save_file(
        others,
        folder / "shard-00000-model-00000-of-00001.safetensors",
        {"format": "pt"},
    )
    assert scores_of(load(folder), TEXTS) == before


@pytest.mark.parametrize(
    "path", ["../other", "/srv/models/other", "2_Dense/../../other", 7, None]
)
def test_refuses_modules_outside_the_folder(
    sentence_model: Path, tmp_path: Path, path: object
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    shutil.copytree(folder / "2_Dense", tmp_path / "other")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=naming("modules.json", str(path))):
        load(folder)


@pytest.mark.parametrize(
    "name",
    ["2_Dense", "2_Dense/model.safetensors", "tokenizer.json", "model.safetensors"],
)
def test_refuses_links_out_of_the_folder(
    sentence_model: Path, tmp_path: Path, name: str
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    shutil.move(folder / name, tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=naming(folder / name, tmp_path / "elsewhere")):
        load(folder)


@pytest.mark.parametrize(
    "shared", [False, True], ids=["of the repository", "of the whole cache"]
)
def test_loads_a_snapshot_of_the_hubs_cache_by_its_path(
    sentence_model: Path, tmp_path: Path, shared: bool
) -> None:
    repository = tmp_path / "hub" / "models--someone--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    common = tmp_path / "hub" / "blobs" / "ab"
    common.mkdir(parents=True)
    for number, path in enumerate(
        file for file in sorted(sentence_model.rglob("*")) if file.is_file()
    ):
        link = snapshot / path.relative_to(sentence_model)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, (common if shared else blobs) / str(number))
        if shared:
            (blobs / str(number)).symlink_to(common / str(number))
        link.symlink_to(blobs / str(number))
    assert scores_of(load(snapshot), TEXTS) == scores_of(load(sentence_model), TEXTS)
    assert locate(str(snapshot)).sha256 == locate(str(sentence_model)).sha256


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_refuses_anything_but_regular_files(
    sentence_model: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Reading a pipe without a writer never returns, reading /dev/zero never ends."""
    folder = copied(sentence_model, tmp_path / "model")
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).mkdir()
    with pytest.raises(ModelError, match=naming(folder / name)):
        load(folder)


def sparse_weights(file: Path, size: int) -> None:
    """Write a valid header of one tensor of float32, and no numbers: the file is a hole."""
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    ).encode()
    with file.open("wb") as written:
        written.write(struct.pack("<Q", len(header)) + header)
        written.truncate(8 + len(header) + size)


def test_refuses_weights_that_do_not_fit_before_hashing_them(
    tuned_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    sparse_weights(folder / "model.safetensors", 2**40)
    monkeypatch.setattr(registry, "_memory", lambda _: 10**9)
    with pytest.raises(ModelError, match=naming("1209.5 GB", "1.0 GB")):
        load(folder)


def test_refuses_weights_that_were_never_written(
    tuned_model: Path, tmp_path: Path
) -> None:
    """`feedmill deploy` hashes on a machine that may have less memory than the worker's device."""
    folder = copied(tuned_model, tmp_path / "model")
    sparse_weights(folder / "model.safetensors", 2**40)
    with pytest.raises(
        ModelError, match=naming(folder / "model.safetensors", f"{2**40 // 10**12:,}")
    ):
        locate(str(folder))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "modules.json"]
)
def test_refuses_configurations_and_tokenizers_of_any_size(
    sentence_model: Path, tmp_path: Path, name: str
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    os.truncate(folder / name, 2**38)
    with pytest.raises(ModelError, match=naming(folder / name)):
        load(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"num_labels": 10**9, "id2label": None, "label2id": None},
        {"n_layers": 10**6},
        {"text_config": {"num_labels": 10**12}},
        {"vocab_size": 10**12},
        {"max_position_embeddings": 10**9},
        {"dim": 10**9},
        {"hidden_dim": 2**22},
        {"n_layers": 200},
    ],
    ids=str,
)
def test_refuses_configurations_that_the_weights_cannot_fill(
    tuned_model: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    changed(folder / "config.json", **values)
    with pytest.raises(ModelError, match=r"config\.json|no weights"):
        load(folder)


def test_refuses_a_second_configuration_that_the_weights_cannot_fill(
    tuned_model: Path, tmp_path: Path
) -> None:
    """transformers reads the newest that config.json lists."""
    folder = copied(tuned_model, tmp_path / "model")
    (folder / "config.5.0.0.json").write_text((folder / "config.json").read_text())
    changed(folder / "config.json", configuration_files=["config.5.0.0.json"])
    changed(folder / "config.5.0.0.json", num_labels=10**9, id2label=None)
    with pytest.raises(
        ModelError, match=naming("config.5.0.0.json", "num_labels", "1,000,000,000")
    ):
        load(folder)


def test_refuses_a_dense_layer_that_its_weights_cannot_fill(
    sentence_model: Path, tmp_path: Path
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    changed(folder / "2_Dense" / "config.json", in_features=60_000, out_features=60_000)
    with pytest.raises(ModelError, match=naming("2_Dense", "60000")):
        load(folder)


def test_refuses_modules_of_torch_that_are_no_activation(
    sentence_model: Path, tmp_path: Path
) -> None:
    folder = copied(sentence_model, tmp_path / "model")
    changed(
        folder / "2_Dense" / "config.json",
        activation_function="torch.nn.modules.transformer.Transformer",
    )
    with pytest.raises(
        ModelError, match=r"torch\.nn\.modules\.transformer\.Transformer"
    ):
        load(folder)


@pytest.mark.parametrize("cut", [0, 5, 100])
def test_refuses_damaged_headers(tuned_model: Path, tmp_path: Path, cut: int) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    file = folder / "model.safetensors"
    os.truncate(file, cut)
    with pytest.raises(ModelError, match=naming(file)):
        load(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]},
        {"dtype": "F32", "shape": [1] * 100_000 + [2], "data_offsets": [0, 8]},
        ["F32"],
    ],
    ids=lambda entry: str(entry)[:60],
)
def test_refuses_headers_that_contradict_the_file(
    tuned_model: Path, tmp_path: Path, entry: Any
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    header = json.dumps({"a": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(8)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=naming(folder / "model.safetensors")):
        locate(str(folder))


@pytest.mark.parametrize("shards", [1, 5])
def test_refuses_more_tensors_than_can_be_named_soon(
    tuned_model: Path, tmp_path: Path, shards: int
) -> None:
    """Empty tensors cost a file a few bytes each, but transformers a part of a millisecond."""
    folder = copied(tuned_model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    places = {}
    for shard in range(shards):
        name = f"model-{shard:05}.safetensors"
        header = json.dumps(
            {f"{shard}.{number}": empty for number in range(MAX_TENSORS // shards + 1)}
        ).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header)
        places[f"{shard}.0"] = name
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places})
    )
    with pytest.raises(ModelError, match=f"tensors; {MAX_TENSORS:,} are supported"):
        locate(str(folder))


@pytest.mark.parametrize("length", [-1, 0, "12", 12.5, True, [12]])
def test_a_limit_that_is_no_number_of_tokens_is_named(
    tuned_model: Path, tmp_path: Path, length: object
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_max_length": length}))
    with pytest.raises(ModelError, match="model_max_length"):
        Tokenizer(locate(str(folder)), 64)


@pytest.mark.parametrize(
    ("length", "limit"), [(12, 12), (12.0, 12), (1e30, 64), (10**30, 64)]
)
def test_limits_in_each_notation_apply(
    tuned_model: Path, tmp_path: Path, length: float, limit: int
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_max_length": length}))
    tokenizer = Tokenizer(locate(str(folder)), 64)
    assert tokenizer.max_tokens == limit
    assert len(tokenizer.encode(["word " * 100])[0].ids) == limit


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "head.safetensors", "added_tokens.json"],
)
def test_refuses_a_folder_that_changes_while_it_is_loaded(
    tuned_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    canary_scores = registry.canary_scores

    def replace_a_file(classifier: Any) -> Any:
        scores = canary_scores(classifier)
        content = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(folder / name)
        return scores

    monkeypatch.setattr(registry, "canary_scores", replace_a_file)
    with pytest.raises(ModelError, match=naming(folder / name, "changed")):
        load(folder)


@pytest.mark.parametrize("kind", ["sentence", "tuned"])
def test_a_loaded_model_does_not_depend_on_its_files(
    sentence_model: Path, tuned_model: Path, tmp_path: Path, kind: str
) -> None:
    """Whoever overwrites or shortens a mapped file changes the labels of a worker, or ends it with
    a bus error.
    """
    folder = copied(
        sentence_model if kind == "sentence" else tuned_model, tmp_path / "model"
    )
    classifier = load(folder)
    before = scores_of(classifier, TEXTS)
    for file in folder.rglob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
            opened.truncate(10)
    assert scores_of(classifier, TEXTS) == before


def test_checks_the_size_before_it_hashes(tuned_model: Path) -> None:
    def refuse(weights: Weights) -> None:
        assert weights.sha256 == ""
        raise ModelError("too large")

    with pytest.raises(ModelError, match="too large"):
        locate(str(tuned_model), check=refuse)


def normalized(folder: Path, steps: list[dict[str, Any]], **others: Any) -> None:
    """Let a tokenizer normalize texts by these steps."""
    changed(
        folder / "tokenizer.json",
        normalizer={"type": "Sequence", "normalizers": steps},
        **others,
    )


def replacement(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "steps",
    [
        [replacement({"String": "a"}, "aa")] * 60,
        [replacement({"Regex": "a"}, "aa")] * 60,
        [replacement({"Regex": ""}, "a" * 50)] * 3,
        [replacement({"String": "a"}, "a" * 100_000)],
        [{"type": "Sequence", "normalizers": [replacement({"String": "a"}, "aa")] * 30}]
        * 2,
        [{"type": "Prepend", "prepend": "a" * 100_000}],
        [{"type": "Lowercase"}] * 100_000,
    ],
    ids=["strings", "patterns", "empty", "long", "nested", "prefix", "many"],
)
def test_refuses_tokenizers_that_make_much_of_little(
    tuned_model: Path, tmp_path: Path, steps: list[dict[str, Any]]
) -> None:
    """Sixty replacements of one letter by two make a text of 10^18 letters, for the added tokens
    at the load.
    """
    folder = copied(tuned_model, tmp_path / "model")
    normalized(folder, steps)
    with pytest.raises(ModelError, match=naming(folder / "tokenizer.json", "1,000")):
        load(folder)


def in_sequence(name: str, step: dict[str, Any], count: int) -> dict[str, Any]:
    return {"type": "Sequence", name: [step] * count}


#: A step that writes every byte as a character of two, and a map of characters: no table, and one
#: text.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
LONG_MAP = {
    "type": "Precompiled",
    "precompiled_charsmap": b64encode(bytes(4) + b"a" * 2000 + b"\0").decode(),
}
OWN_TOKEN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": in_sequence("pretokenizers", BYTE_LEVEL, 30)},
        {"normalizer": in_sequence("normalizers", {"type": "ByteLevel"}, 30)},
        {"normalizer": LONG_MAP},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"Sequence": {"id": "B", "type_id": 0}},
                ],
                "special_tokens": {
                    "[CLS]": {
                        "id": "[CLS]",
                        "ids": [2] * 20_000,
                        "tokens": ["[CLS]"] * 20_000,
                    }
                },
            }
        },
        {
            "added_tokens": [
                OWN_TOKEN | {"id": 200 + number, "content": f"own{number}"}
                for number in range(20_000)
            ]
        },
        {"added_tokens": [OWN_TOKEN | {"id": 200, "content": "a" * 2**21}]},
    ],
    ids=["pre-tokenizer", "bytes", "map", "template", "own tokens", "a long token"],
)
def test_refuses_tokenizers_whose_other_parts_make_much(
    tuned_model: Path, tmp_path: Path, parts: dict[str, Any]
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    changed(folder / "tokenizer.json", **parts)
    with pytest.raises(
        ModelError, match=naming(folder / "tokenizer.json", "Use another model")
    ):
        load(folder)


def test_accepts_the_replacements_of_published_tokenizers(
    tuned_model: Path, tmp_path: Path
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    spaces = [
        replacement({"Regex": " {2,}"}, "\u2581"),
        replacement({"String": "``"}, '"'),
        {"type": "NFKC"},
    ]
    normalized(
        folder,
        [
            *spaces,
            {"type": "Prepend", "prepend": "\u2581"},
            replacement({"String": " "}, "\u2581"),
        ],
    )
    assert load(folder).kind == "sequence"
    changed(
        folder / "tokenizer.json",
        pre_tokenizer=in_sequence("pretokenizers", BYTE_LEVEL, 2),
    )
    assert load(folder).kind == "sequence"


@pytest.mark.parametrize(
    "part", ["normalizer", "model", "post_processor", "pre_tokenizer"]
)
def test_a_panic_of_the_tokenizer_is_a_model_error(
    tuned_model: Path, tmp_path: Path, part: str
) -> None:
    """Rust code panics at a load, or at the first text. pyo3's PanicException is no Exception."""
    folder = copied(tuned_model, tmp_path / "model")
    parts = {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""},
        "model": {
            "type": "BPE",
            "vocab": {"a": 0},
            "merges": ["a a"],
            "unk_token": None,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "none", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
        "pre_tokenizer": {"type": "FixedLength", "length": 0},
    }
    changed(folder / "tokenizer.json", **{part: parts[part]})
    with pytest.raises(ModelError, match=str(folder)):
        load(folder)


# Folders of other tools, and configurations that were edited.


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"id2label": {"1": "a", "2": "b"}}, ("id2label", "1, 2", "0, 1")),
        ({"id2label": {"0": "a", "2": "b"}}, ("id2label", "0, 2")),
        ({"id2label": ["a", "b"]}, ("id2label", "0, 1")),
        (
            {"id2label": {"0": "a", "1": None}, "label2id": None},
            ("id2label", "null", "text"),
        ),
        (
            {"id2label": {"0": ["a"], "1": "b"}, "label2id": None},
            ("id2label", "a", "text"),
        ),
        ({"id2label": {"a": 0, "b": 1}}, ("id2label", "a, b")),
        ({"label2id": {"a": "one", "b": "two"}}, ("label2id", "one")),
        ({"label2id": ["a", "b"]}, ("label2id",)),
        (
            {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": None},
            ("3 labels", "head for 2"),
        ),
        (
            {"id2label": {"0": "a"}, "label2id": None, "problem_type": "regression"},
            ("1 labels", "head for 2"),
        ),
    ],
    ids=str,
)
def test_names_what_is_wrong_with_a_models_labels(
    tuned_model: Path, tmp_path: Path, values: dict[str, Any], words: tuple[str, ...]
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    changed(folder / "config.json", **values)
    with pytest.raises(ModelError, match=naming("config.json", *words)):
        load(folder)


def test_reads_numbers_of_labels_that_are_texts(tmp_path: Path) -> None:
    folder = make_model(
        "bert", tmp_path, {0: "contradiction", 1: "neutral", 2: "entailment"}
    )
    expected = scores_of(load(folder), TEXTS, labels=["food", "sports"])
    changed(
        folder / "config.json",
        label2id={"contradiction": "0", "neutral": "1", "entailment": "2"},
    )
    assert scores_of(load(folder), TEXTS, labels=["food", "sports"]) == expected
    changed(
        folder / "config.json",
        label2id={"contradiction": 1, "neutral": 2, "entailment": 3},
    )
    with pytest.raises(ModelError, match=naming("label2id", "entailment", "3")):
        load(folder)


@pytest.mark.parametrize(
    ("prefix", "wrapper"),
    [("_orig_mod.", "torch.compile"), ("module.", "DataParallel")],
)
def test_names_the_wrapper_that_renamed_the_weights(
    tuned_model: Path, tmp_path: Path, prefix: str, wrapper: str
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({prefix + name: values for name, values in load_file(file).items()}, file)
    with pytest.raises(
        ModelError, match=naming(file, prefix, wrapper, "save_pretrained")
    ):
        load(folder)


@pytest.mark.parametrize("complete", [False, True])
def test_names_adapters(tuned_model: Path, tmp_path: Path, complete: bool) -> None:
    """With peft installed, transformers would apply the adapter, or load the base model that it
    names.
    """
    folder = copied(tuned_model, tmp_path / "model")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "/srv/models/other"})
    )
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    if not complete:
        (folder / "model.safetensors").unlink()
        (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=naming(folder, "LoRA", "merge_and_unload")):
        load(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "pytorch_model.bin",
            ("pytorch_model.bin", "pickled", "AutoModelForSequenceClassification"),
        ),
        ("model.fp16.safetensors", ("model.fp16.safetensors", "save_pretrained")),
        ("model.gguf", ("model.gguf", "save_pretrained")),
        ("README.md", ("save_pretrained",)),
    ],
)
def test_names_weights_of_another_format(
    tuned_model: Path, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    folder = copied(tuned_model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(
        ModelError, match=naming(folder, "has no model.safetensors", *words)
    ):
        load(folder)


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertModel"])
def test_names_the_modules_of_a_modular_cross_encoder(
    tmp_path: Path, architecture: str
) -> None:
    """Without its other modules, the transformer's scores would mean nothing."""
    folder = make_sentence_model(tmp_path, dense=1)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "CrossEncoder"})
    )
    changed(folder / "config.json", architectures=[architecture])
    with pytest.raises(
        ModelError,
        match=naming(folder, "cross-encoder", "Pooling", "Dense", "conversion"),
    ):
        load_classifier(Settings(model=str(folder)), FP32)


def test_names_a_transformer_in_a_folder_of_its_own(
    sentence_model: Path, tmp_path: Path
) -> None:
    """Older versions of sentence-transformers wrote it there.

    The files beside modules.json are another model's.
    """
    folder = copied(sentence_model, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=naming("modules.json", "0_Transformer")):
        load(folder)


def test_hard_links_made_during_a_load_change_nothing(tmp_path: Path) -> None:
    """Installers and backups link files, which changes their status and nothing that is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = ["config.json", "model.safetensors"]
    for name in names:
        (folder / name).write_bytes(b"before")
    listed_before = [
        ModelFile(name, folder / name, _stamp((folder / name).stat())) for name in names
    ]
    before = with_digests(listed_before)
    for name in names:
        os.link(folder / name, tmp_path / name)
    linked = [
        ModelFile(name, folder / name, _stamp((folder / name).stat())) for name in names
    ]
    assert [file.stamp for file in linked] != [file.stamp for file in listed_before]
    check_unchanged(folder, before, linked)
    for name in names:
        times = (folder / name).stat()
        (folder / name).write_bytes(b"behind")
        os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))
        changed = [
            ModelFile(name, folder / name, _stamp((folder / name).stat()))
            for name in names
        ]
        with pytest.raises(ModelError, match="changed while"):
            check_unchanged(folder, before, changed)
        (folder / name).write_bytes(b"before")
        os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))
