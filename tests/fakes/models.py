"""Small models of real architectures, with random weights and newly made tokenizers.

Comparing two ways to run a model needs no trained weights, and the tests must run offline. The
weights vary more than the usual initial weights, so that scores differ from each other.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from feedmill.shared.messages import ClassifyOptions
from feedmill.workers.models.classifiers import Classifier
from feedmill.workers.models.device import Device

NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
#: Training text of the tokenizers, with enough words for tokens of several lengths.
CORPUS = (
    "The match ended in a draw after the keeper saved a late penalty.",
    "My laptop will not boot since the last update, what should I try?",
    "This example is sports. This example is technology. This post is about food.",
    "Which savings account pays the most interest at the moment?",
    "I baked sourdough bread for the first time and the crust came out well.",
    "Climate change, health, education, gaming, politics, science, music, travel, books.",
)
WIDTH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}


def fp(dtype: torch.dtype = torch.float32) -> Device:
    return Device(torch.device("cpu"), dtype, "for a test")


FP32 = fp()


def scores_of(
    classifier: Classifier, texts: Sequence[str], **options: Any
) -> list[dict[str, float]]:
    """Return the scores of all texts from one forward pass of rows sorted by length."""
    prepared = classifier.prepare(
        texts, classifier.label_set(ClassifyOptions.parse(options))
    )
    rows = [row for of_text in prepared for row in of_text]
    for text, of_text in enumerate(prepared):
        for row in of_text:
            row.owner = text
    rows.sort(key=lambda row: row.length)
    found = {
        row.owner: scores
        for row, scores in classifier.finish(rows, classifier.forward(rows))
    }
    return [found[text] for text in range(len(texts))]


def _bytes(before: str, after: str, between: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer like those of BART, RoBERTa and ModernBERT."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = list(dict.fromkeys([before, "<pad>", after, *between, "<unk>"]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=specials, initial_alphabet=alphabet
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}",
        pair=f"{before} $A {' '.join(between)} $B {after}",
        special_tokens=[
            (token, tokenizer.token_to_id(token))
            for token in dict.fromkeys([before, after, *between])
        ],
    )
    return tokenizer


def _bart() -> Tokenizer:
    return _bytes("<s>", "</s>", ["</s>", "</s>"])


def byte_tokenizer(max_length: int | None = None) -> Any:
    """Return a tokenizer of transformers with the special tokens of BART, whose ids are 0, 1 and
    2.
    """
    return _fast(_bart(), "bart", max_length, "right")


def _modern() -> Tokenizer:
    return _bytes("[CLS]", "[SEP]", ["[SEP]"])


def _decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _qwen() -> Tokenizer:
    """Return a tokenizer that ends texts with a token, like that of Qwen3-Embedding."""
    tokenizer = _decoder()
    end = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, tokenizer.token_to_id(end))],
    )
    return tokenizer


def _typed(model: Any, before: Any) -> Tokenizer:
    """Return a tokenizer with [CLS] A [SEP] B [SEP] and token types, like those of BERT and
    DeBERTa.
    """
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = before
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIALS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# WordPiece and Unigram vocabularies are made by hand: their trainers number tokens differently in
# each run, which changes the scores.
WORDS = sorted({word.strip(".,?") for line in CORPUS for word in line.split()})
LETTERS = sorted({letter for word in WORDS for letter in word} | set(".,?'"))


def _bert() -> Tokenizer:
    pieces = dict.fromkeys(
        [*SPECIALS, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    )
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return _typed(
        models.WordPiece(vocabulary, unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
    )


def _unigram() -> Tokenizer:
    pieces = dict.fromkeys([*SPECIALS, *(f"▁{word}" for word in WORDS), "▁", *LETTERS])
    scored = [
        (piece, 0.0 if piece in SPECIALS else -5.0 - len(piece) % 3) for piece in pieces
    ]
    return _typed(
        models.Unigram(scored, SPECIALS.index("[UNK]"), False),
        pre_tokenizers.Metaspace(),
    )


BYTES_NAMES = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
TYPED_NAMES = {
    "cls_token": "[CLS]",
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
}
#: The class of a model's configuration, and its arguments.
Config = tuple[Callable[..., transformers.PreTrainedConfig], dict[str, Any]]
#: Architecture -> configuration class and arguments, function that makes the tokenizer, special
#: tokens.
ARCHITECTURES: dict[str, tuple[*Config, Callable[[], Tokenizer], dict[str, str]]] = {
    "bart": (
        transformers.BartConfig,
        {
            "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
            "init_std": 0.2,
            "max_position_embeddings": 200, "forced_eos_token_id": None,
        },
        _bart,
        BYTES_NAMES,
    ),
    "roberta": (transformers.RobertaConfig, WIDTH | {"type_vocab_size": 1}, _bart, BYTES_NAMES),
    "xlm-roberta": (transformers.XLMRobertaConfig, WIDTH | {"type_vocab_size": 1}, _bart,
    BYTES_NAMES),
    "bert": (transformers.BertConfig, WIDTH, _bert, TYPED_NAMES),
    "electra": (transformers.ElectraConfig, WIDTH | {"embedding_size": 16}, _bert, TYPED_NAMES),
    "distilbert": (
        transformers.DistilBertConfig,
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "initializer_range": 0.2},
        _bert,
        TYPED_NAMES,
    ),
    "deberta-v2": (
        transformers.DebertaV2Config,
        WIDTH | {
            "type_vocab_size": 0, "relative_attention": True, "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
            "pooler_hidden_size": 32,
        },
        _unigram,
        TYPED_NAMES,
    ),
    "modernbert": (
        transformers.ModernBertConfig,
        WIDTH | {"global_attn_every_n_layers": 2, "local_attention": 16,
        "initializer_cutoff_factor": 2.0},
        _modern,
        {"cls_token": "[CLS]", "pad_token": "<pad>", "sep_token": "[SEP]"},
    ),
    "mpnet": (transformers.MPNetConfig, WIDTH, _bart, BYTES_NAMES),
    "nomic_bert": (transformers.NomicBertConfig, WIDTH, _bert, TYPED_NAMES),
    "gte": (transformers.GteConfig, WIDTH, _bart, BYTES_NAMES),
    "qwen3": (
        transformers.Qwen3Config,
        WIDTH | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
        _qwen,
        {"pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 200, "initializer_range": 0.2},
        _decoder,
        {"eos_token": "<|endoftext|>"},
    ),
}  # fmt: skip
#: Architectures whose modules are almost those of another one.
SIMILAR_ARCHITECTURES = frozenset(
    {"distilbert", "electra", "gte", "mpnet", "qwen3", "xlm-roberta"}
)
#: Architectures with token types.
TYPED = frozenset({"bert", "electra", "deberta-v2", "nomic_bert"})


def cases_of(architectures: Iterable[str]) -> list[Any]:
    """Return architectures as cases of a test; SIMILAR_ARCHITECTURES are long tests."""
    cases = []
    for architecture in sorted(architectures):
        marks = (pytest.mark.long,) if architecture in SIMILAR_ARCHITECTURES else ()
        cases.append(pytest.param(architecture, marks=marks))
    return cases


def make_model(
    architecture: str,
    folder: Path,
    labels: dict[int, str] | None = None,
    max_length: int | None = 128,
    padding_side: str = "right",
    **config: Any,
) -> Path:
    """Save a model, a classifier if there are labels and else an encoder, to `folder`.

    Return the folder.
    """
    make_config, arguments, make_tokenizer, specials = ARCHITECTURES[architecture]
    tokenizer = make_tokenizer()
    ids = {
        f"{name}_id": tokenizer.token_to_id(token) for name, token in specials.items()
    }
    if labels:
        config |= {
            "id2label": labels,
            "label2id": {name: place for place, name in labels.items()},
        }
    positions = (
        {} if architecture in ("bart", "gpt2") else {"max_position_embeddings": 200}
    )
    made = make_config(
        **{
            "vocab_size": tokenizer.get_vocab_size(),
            **arguments,
            **positions,
            **ids,
            **config,
        }
    )
    torch.manual_seed(7)
    kind = (
        transformers.AutoModelForSequenceClassification
        if labels
        else transformers.AutoModel
    )
    model = kind.from_config(made)  # type: ignore[no-untyped-call]
    for (
        name,
        parameter,
    ) in model.named_parameters():  # a head of zeros would give equal scores
        if "classifier" in name or "head" in name or "score" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    _fast(tokenizer, architecture, max_length, padding_side).save_pretrained(folder)
    return folder


def _fast(
    tokenizer: Tokenizer, architecture: str, max_length: int | None, padding_side: str
) -> Any:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_input_names=[
            "input_ids",
            *(["token_type_ids"] if architecture in TYPED else []),
            "attention_mask",
        ],
        padding_side=padding_side,
        **({"model_max_length": max_length} if max_length else {}),
        **ARCHITECTURES[architecture][-1],
    )


def make_gliclass(
    folder: Path,
    architecture: str = "deberta-v2",
    max_length: int | None = 128,
    **config: Any,
) -> Path:
    """Save a GLiClass checkpoint as the package does. config: options of its configuration.

    Return the folder.
    """
    from gliclass import GLiClassModel, GLiClassModelConfig  # noqa: PLC0415 - few tests need it

    make_config, arguments, make_tokenizer, specials = ARCHITECTURES[architecture]
    tokenizer = make_tokenizer()
    ids = {
        f"{name}_id": tokenizer.token_to_id(token) for name, token in specials.items()
    }
    fast = _fast(tokenizer, architecture, max_length, "right")
    fast.add_tokens(["<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>"], special_tokens=True)
    fast.save_pretrained(folder)
    label, separator = fast.convert_tokens_to_ids(["<<LABEL>>", "<<SEP>>"])
    encoder = make_config(
        **arguments | ids | {"vocab_size": len(fast), "max_position_embeddings": 200}
    )
    options = {
        "class_token_index": label,
        "text_token_index": separator,
        "prompt_first": True,
        "scorer_num_heads": 4,
    }
    torch.manual_seed(7)
    made = GLiClassModelConfig(
        encoder_config=encoder,
        encoder_model="none",
        initializer_range=0.2,
        **options | config,
    )
    model = GLiClassModel(made)
    # biases of zeros would hide that one is missing
    for name, parameter in model.named_parameters():
        if "encoder_model" not in name and parameter.dim():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def make_sentence_model(
    folder: Path,
    architecture: str = "bert",
    pooling: dict[str, Any] | None = None,
    dense: int = 0,
    prompt: str = "",
) -> Path:
    """Save a sentence-transformers model. dense: dimensions of a dense layer after pooling; 0 for
    none.
    """
    make_model(architecture, folder)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    package = "sentence_transformers.models"
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"{package}.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False})
    )
    if prompt:
        prompts = {"prompts": {"topic": prompt}, "default_prompt_name": "topic"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 32} | (
        pooling or {"pooling_mode_mean_tokens": True}
    )
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if dense:
        from safetensors.torch import save_file  # noqa: PLC0415 - few tests need it

        (folder / "2_Dense").mkdir()
        layer = {
            "in_features": 32,
            "out_features": dense,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (folder / "2_Dense" / "config.json").write_text(json.dumps(layer))
        tensors = {
            "linear.weight": torch.randn(dense, 32),
            "linear.bias": torch.randn(dense),
        }
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


def write_modules(folder: Path, *later: dict[str, Any]) -> Path:
    """Replace the modules behind the pooling of a sentence-transformers model. Return the folder.

    later: options of each module: of Normalize, none; of Dense, at least `out_features` of its
    configuration.
    """
    from safetensors.torch import save_file  # noqa: PLC0415 - few tests need it

    kinds = [
        "Transformer",
        "Pooling",
        *("Dense" if options else "Normalize" for options in later),
    ]
    modules = [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{kind}" if place else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    width = 32
    torch.manual_seed(7)
    for module, options in zip(modules[2:], later, strict=True):
        path = folder / str(module["path"])
        path.mkdir(exist_ok=True)
        if not options:
            continue
        config = {"in_features": width, "bias": True} | options
        weight = torch.randn(config["out_features"], width)
        biases = (
            {"linear.bias": torch.randn(config["out_features"])}
            if config["bias"]
            else {}
        )
        (path / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": weight} | biases, path / "model.safetensors")
        width = config["out_features"]
    return folder
