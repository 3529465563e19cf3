"""The options KEY=VALUE of `feedmill train --trainer`, which become transformers'
TrainingArguments.

`parse` needs no torch, so that a misspelt option is refused before anything is loaded. `typed`
checks names and types against the installed transformers.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_type_hints

from feedmill.shared.errors import UserError, printable

#: Keys that an option of `feedmill train` sets, and that option.
OPTIONS = {
    "output_dir": "--out",
    "per_device_train_batch_size": "--batch-size",
    "gradient_accumulation_steps": "--accumulation",
    "num_train_epochs": "--epochs",
    "learning_rate": "--learning-rate",
    "seed": "--seed",
    "data_seed": "--seed",
    "bf16": "--dtype",
    "fp16": "--dtype",
    "bf16_full_eval": "--dtype",
    "fp16_full_eval": "--dtype",
    "use_cpu": "--device",
    "local_rank": "--devices",
    "eval_strategy": "--eval",
    "eval_steps": "--eval",
    "eval_delay": "--eval",
    "eval_on_start": "--eval",
    "load_best_model_at_end": "--patience",
    "metric_for_best_model": "--patience",
    "greater_is_better": "--patience",
}
#: Keys that cannot be set, and why.
REASONS = {
    "auto_find_batch_size": "a batch that runs out of memory is halved anyway",
    "label_smoothing_factor": (
        "Feedmill's loss does not use it; --targets soft learns distributions"
    ),
    "train_sampling_strategy": "posts are always grouped by length",
    "length_column_name": "posts are always grouped by length",
    "dataloader_drop_last": "every post is learnt",
    "save_strategy": "a checkpoint is written after each epoch",
    "save_steps": "a checkpoint is written after each epoch",
    "save_total_limit": "the same command needs the last checkpoints to continue",
    "save_only_model": "the same command needs the optimizer's state to continue",
    "save_on_each_node": "rank 0 writes the checkpoints",
    "enable_jit_checkpoint": "the same command continues an interrupted training",
    "resume_from_checkpoint": "the same command continues an interrupted training",
    "ignore_data_skip": "a continued training must see the same posts",
    "restore_callback_states_from_checkpoint": (
        "the same command continues an interrupted training"
    ),
    "disable_tqdm": "Feedmill shows the progress",
}
#: Keys that Feedmill's own training code depends on.
RESERVED = frozenset(
    {
        "accelerator_config", "average_tokens_across_devices", "batch_eval_metrics", "ddp_backend",
        "debug", "deepspeed", "do_eval", "do_predict", "do_train", "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_use_gather_object", "fsdp", "fsdp_config", "include_for_metrics", "label_names",
        "parallelism_config",
        "prediction_loss_only", "push_to_hub", "remove_unused_columns", "skip_memory_metrics",
    }
)  # fmt: skip
#: Beginning of the keys that upload the model.
HUB = "hub_"
#: Keys with a new name in transformers 5, which warns of the old one.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
#: Keys that transformers has moved to an environment variable, and that variable.
ENVIRONMENT = {"logging_dir": "TENSORBOARD_LOGGING_DIR"}
#: Least values that the Trainer assumes without a check.
LEAST = {
    "max_steps": 1,
    "dataloader_num_workers": 0,
    "logging_steps": 0,
    "per_device_eval_batch_size": 1,
}
#: Similar keys to name in an error.
MAX_SIMILAR = 3


def parse(texts: Sequence[str]) -> dict[str, str]:
    """Parse options such as max_steps=100.

    Raises UserError for another form, a repeated key or a refused one.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UserError(
                "--trainer: write KEY=VALUE, such as max_steps=100, instead of "
                f"{printable(text)!r:.80}."
            )
        if key in pairs:
            raise UserError(
                f"--trainer: {printable(key):.60} is given twice. Leave out one of them."
            )
        _refuse(key)
        pairs[key] = value.strip()
    return pairs


def _refuse(key: str) -> None:
    """Raise UserError if Feedmill sets this key itself."""
    if key in OPTIONS:
        raise UserError(f"--trainer: {key} cannot be set there. Use {OPTIONS[key]}.")
    if key in REASONS:
        raise UserError(
            f"--trainer: {key} cannot be set: {REASONS[key]}. Leave it out."
        )
    if key in RESERVED or key.startswith(HUB):
        raise UserError(
            f"--trainer: {printable(key):.60} cannot be set: Feedmill's training depends on it."
        )


def typed(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Return the values in the types of TrainingArguments. Imports transformers.

    Leaves out the keys in ENVIRONMENT. Raises UserError for an unknown key or a value of another
    type.
    """
    values = {}
    for key, text in pairs.items():
        if key in ENVIRONMENT:
            continue
        name = RENAMED.get(key, key)
        values[name] = _value(key, name, text)
    return values


def environment(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the environment that transformers reads instead of arguments."""
    variables = {}
    for key, variable in ENVIRONMENT.items():
        if key in pairs:
            variables[variable] = pairs[key]
    return variables


def _value(key: str, name: str, text: str) -> Any:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 - after the data was read

    kinds = _kinds()
    if name not in kinds:
        names = [*kinds, *RENAMED, *ENVIRONMENT]
        similar = get_close_matches(key, names, MAX_SIMILAR)
        hint = "transformers' TrainingArguments lists them."
        if similar:
            hint = f"Similar ones: {', '.join(similar)}."
        raise UserError(f"--trainer: there is no {printable(key):.60}. {hint}")
    kind = kinds[name]
    parts = get_args(kind)
    if "," in text and list[str] in parts:
        return [part.strip() for part in text.split(",")]
    try:
        if dict[str, Any] in parts or dict in parts:
            json_object = TypeAdapter(dict[str, Any])
            return json_object.validate_json(text)
        adapter = TypeAdapter(kind, config={"allow_inf_nan": False})
        value = adapter.validate_python(text)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(
            f"--trainer: {key} cannot be {printable(text)!r:.60}: {printable(reason)}."
        ) from None
    least = LEAST.get(name)
    if least is not None and value < least:
        raise UserError(
            f"--trainer: {key} must be at least {least}, not {printable(text):.60}."
        )
    return value


@cache
def _kinds() -> dict[str, Any]:
    """Return the types of TrainingArguments' fields that can be set."""
    from dataclasses import fields  # noqa: PLC0415 - with transformers

    from transformers import TrainingArguments  # noqa: PLC0415 - torch

    hints = get_type_hints(TrainingArguments)
    kinds = {}
    for field in fields(TrainingArguments):
        name = field.name
        if name in {*OPTIONS, *REASONS, *RESERVED} or name.startswith(HUB):
            continue
        if field.init:
            kinds[name] = hints[name]
    return kinds
