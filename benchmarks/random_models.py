"""Models with the configurations of well-known ones, random weights and tokenizers trained on the
spot.

Measuring speed needs no trained weights, so nothing is downloaded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import (
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
)

CLASSES = {0: "contradiction", 1: "neutral", 2: "entailment"}
#: sentence-transformers/all-MiniLM-L6-v2.
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
#: distilbert-base-uncased-finetuned-sst-2-english.
DISTILBERT: dict[str, Any] = {
    "dim": 768,
    "n_layers": 6,
    "n_heads": 12,
    "hidden_dim": 3072,
}
#: facebook/bart-large-mnli: BartConfig's defaults.
BART_LARGE: dict[str, Any] = {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
}
#: Overrides for small models of the same kinds.
SMALL_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
SMALL_DISTILBERT: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
}
SMALL_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 30_000,
}  # fmt: skip
BERT_SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
}
BART_SPECIALS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}


def save_minilm(folder: Path, texts: Sequence[str], small: bool = False) -> None:
    """Save a sentence-transformers model with MiniLM's configuration and a WordPiece tokenizer
    trained on the texts.
    """
    _save_encoder(BertConfig(**MINILM | (SMALL_BERT if small else {})), folder, texts)


def save_bert_base(folder: Path, texts: Sequence[str], small: bool = False) -> None:
    """Save a sentence-transformers model with BERT-base's configuration, BertConfig's defaults,
    likewise.
    """
    _save_encoder(BertConfig(**SMALL_BERT if small else {}), folder, texts)


def _save_encoder(config: Any, folder: Path, texts: Sequence[str]) -> None:
    save(AutoModel, config, folder)
    _save_word_pieces(folder, texts, ["input_ids", "token_type_ids", "attention_mask"])
    package = "sentence_transformers.models"
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"{package}.{kind}",
        }
        for at, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 256, "do_lower_case": False})
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )


def save_distilbert(folder: Path, texts: Sequence[str], small: bool = False) -> None:
    """Save a classifier with DistilBERT's configuration and a WordPiece tokenizer trained on the
    texts.
    """
    _save_classifier(
        DistilBertConfig(**DISTILBERT | (SMALL_DISTILBERT if small else {})),
        folder,
        texts,
    )


def save_modernbert_base(
    folder: Path, texts: Sequence[str], small: bool = False
) -> None:
    """Save a classifier with ModernBERT-base's configuration, ModernBertConfig's defaults,
    likewise.
    """
    specials = dict.fromkeys(("bos_token_id", "cls_token_id"), 2) | dict.fromkeys(
        ("eos_token_id", "sep_token_id"), 3
    )
    _save_classifier(
        ModernBertConfig(**specials | (SMALL_BERT if small else {}), pad_token_id=0),
        folder,
        texts,
    )


def _save_classifier(config: Any, folder: Path, texts: Sequence[str]) -> None:
    config.id2label = {0: "NEGATIVE", 1: "POSITIVE"}
    config.label2id = {name: number for number, name in config.id2label.items()}
    save(AutoModelForSequenceClassification, config, folder)
    _save_word_pieces(folder, texts, ["input_ids", "attention_mask"])


def save_bart_large(
    folder: Path, texts: Sequence[str], small: bool = False, **config: Any
) -> None:
    """Save a model with BART-large's configuration for NLI and a byte-level tokenizer trained on
    the texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=30_000,
        show_progress=False,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    given: dict[str, Any] = BART_LARGE | (SMALL_BART if small else {}) | config
    given |= {
        "id2label": CLASSES,
        "label2id": {name: number for number, name in CLASSES.items()},
    }
    save(
        AutoModelForSequenceClassification,
        BartConfig(**given, forced_eos_token_id=None),
        folder,
    )
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        **BART_SPECIALS,
        model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


def save(kind: Any, config: Any, folder: Path) -> None:
    """Save a model of this configuration with random weights. kind: one of transformers' Auto
    classes.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(7)
    model = kind.from_config(config)
    for name, parameter in model.named_parameters():
        # with default weights, scores would differ only by rounding
        if "classif" in name and parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(folder)


def _save_word_pieces(folder: Path, texts: Sequence[str], inputs: list[str]) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token=BERT_SPECIALS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = [*BERT_SPECIALS.values(), "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=30_000, show_progress=False, special_tokens=specials
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        **BERT_SPECIALS,
        model_max_length=512,
        model_input_names=inputs,
    ).save_pretrained(folder)
