"""Fine-tune a classifier with transformers' Trainer: examples and options in, weights out.

A sentence-transformers base keeps its pooling and gets a head on its unit vectors (`Pooled`), any other base becomes
transformers' sequence classifier. Differences from the plain Trainer:

- the new head is fitted to the base's features first. A random one sends large, undirected gradients into the base,
  which distorts its features ("Fine-Tuning can Distort Pretrained Features", arXiv 2202.10054);
- the logits are scaled at the end: a second training, on four fifths of at most MAX_VALIDATED examples, shows by the
  log loss of the others by how much a training makes them too large (temperature scaling, see `head.py`);
- seed and epoch alone decide the order of examples (`Order`); the Trainer's grouping by length draws from the global
  generator. Resumed and accumulated runs therefore see the same batches;
- the loss is a sum divided by the examples of the whole optimization step, so gradient accumulation is exact.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.functional import normalize
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

from feedmill.console import Report
from feedmill.producers.records import Labelled
from feedmill.shared.errors import ModelError, UserError
from feedmill.shared.settings import Settings
from feedmill.training.data import CHECKPOINTS, Dataset, TrainOptions
from feedmill.training.head import (
    FOLDS,
    MAX_VALIDATED,
    best_sharpness,
    described,
    fit,
    loss_of_rows,
    save_with_head,
)
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.layout import Layout, read_layout
from feedmill.workers.models.classifiers.registry import check_size, classifier_kind
from feedmill.workers.models.classifiers.similarity import DEFAULT_TEMPLATE
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.engines.network import Network, load_pretrained, padding_token
from feedmill.workers.models.tokenizer import load_tokenizer
from feedmill.workers.models.weights import Weights, locate, max_row_tokens, read_config

#: Rows per forward pass when fitting the head. Fixed, so that the head does not depend on the batch size.
HEAD_BATCH_SIZE = 16
#: Least examples whose logits are scaled: a fifth of them must tell one number.
MIN_VALIDATED = 50
#: Maximum examples for fitting the head, where the training starts.
MAX_HEAD_EXAMPLES = 5_000
#: Approximate number of points on the loss curve.
CURVE_POINTS = 60
#: Share of the steps with a rising learning rate; it then falls to 0 linearly.
WARMUP = 0.1
WEIGHT_DECAY = 0.01
#: Optimization steps whose examples are sorted by length together. More steps reduce padding; fewer add randomness.
STEPS_SORTED_TOGETHER = 32


class Pooled(torch.nn.Module):
    """A sentence encoder as the classifier `similarity` runs it, and a linear layer for the labels on its unit vectors.

    Dense layers of the base stay as they are. Raises ModelError if the folder holds no such model.
    """

    def __init__(self, weights: Weights, layout: Layout, labels: int, pad_id: int) -> None:
        super().__init__()
        self.network = Network(weights, torch.float32, layout.pooling, pad_id)
        self.dense = torch.nn.ModuleList(layout.dense).requires_grad_(False)
        self._dimensions = layout.truncate_dim
        with torch.no_grad():
            width = self.embed(torch.tensor([[pad_id]]), torch.tensor([[1]])).shape[1]
        self.last = torch.nn.Linear(width, labels)

    def embed(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return unit vectors: [rows, dimensions]. The inputs are those of transformers: [rows, tokens]."""
        vectors = self.network(input_ids, attention_mask.bool(), token_type_ids, attention_mask)
        for layer in self.dense:
            vectors = layer(vectors)
        return normalize(vectors[:, : self._dimensions].float(), dim=-1)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the logits, [rows, labels] in float32, as transformers names them. Takes what `embed` takes."""
        vectors = self.embed(input_ids, attention_mask, token_type_ids)
        with torch.autocast(vectors.device.type, enabled=False):
            return {"logits": self.last(vectors)}


class Trained(NamedTuple):
    """Result of a training run. save: writes the model's folder; raises OSError."""

    model: Any
    tokenizer: Any
    #: The training's part of training.json: plan, seconds, samples_per_s and curve, the Trainer's
    #: log of losses.
    record: dict[str, Any]
    save: Callable[[Path], None]


class Training:
    """One training run. Raises UserError if it cannot start."""

    def __init__(self, dataset: Dataset, options: TrainOptions, settings: Settings, report: Report) -> None:
        self._dataset, self._options, self._settings = dataset, options, settings
        self._report = report
        self._device = device.select_device(settings.device, "float32")
        self._precision, self._why_precision = device.for_training(self._device, settings.dtype)
        self._weights = locate(options.base, settings.revision, settings.trust_remote_code)
        check_size(self._weights, self._device)
        self._layout: Layout | None = None
        self._tokenizer = _tokenizer(self._weights, options.max_tokens)
        if _embeds(self._weights) and not (layout := read_layout(self._weights, settings)).static:
            self._layout = layout
            limit = layout.texts.max_tokens or self._tokenizer.model_max_length
            self._tokenizer.model_max_length = min(self._tokenizer.model_max_length, limit)
        self._collate = DataCollatorWithPadding(
            self._tokenizer, pad_to_multiple_of=8 if self._device.torch.type == "cuda" else None
        )

    @device_errors()
    def run(self) -> Trained:
        """Train the model. Raises UserError, DeviceFull or DeviceLost."""
        data, began = self._dataset, time.monotonic()
        self._report.phase(f"tokenizing {len(data.train):,} posts")
        rows = self._rows(data.train)
        last, plan = self._last_checkpoint(), self._plan()
        trainer = self._train(rows, "training", last)
        training_s = trainer.state.log_history[-1]["train_runtime"]
        steps = trainer.state.global_step - (0 if last is None else int(last.rpartition("-")[2]))
        model = trainer.accelerator.unwrap_model(trainer.model)
        if (layer := self._last_layer(model)) is not None:  # else no layer could be scaled
            plan["sharpness"] = self._sharpness(rows)
            with torch.no_grad():
                for values in layer.parameters():
                    values.mul_(plan["sharpness"])
        record = {
            "plan": plan,
            "seconds": time.monotonic() - began,
            "samples_per_s": steps * plan["effective_batch"] / training_s,
            "curve": [entry for entry in trainer.state.log_history if "loss" in entry],
        }
        return Trained(model, self._tokenizer, record, lambda folder: self._save(model.to("cpu"), folder))

    def _train(self, rows: Sequence[dict[str, Any]], phase: str, last: str | None = None, keep: bool = True) -> Any:
        """Fit the head of a new model, then train all weights on these rows; return the Trainer.

        last: the checkpoint to continue from. keep: write checkpoints.
        """
        seed, labels = self._options.seed, self._dataset.labels
        transformers.set_seed(seed)
        self._report.phase(f"loading {self._weights.name}")
        pad_id, arguments = self._tokenizer.pad_token_id, self._arguments(keep)
        if self._layout:
            model: Any = Pooled(self._weights, self._layout, len(labels), pad_id)
        else:
            model = make_model(self._weights, labels, pad_id)
        model.to(arguments.device)
        if last is None:
            self._report.phase("fitting the head")
            self._fit_head(model, rows)
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=self._collate,
            compute_loss_func=self._loss_of_step,
            callbacks=[_Progress(self._report)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        self._report.phase(phase, self._steps(len(rows)))
        transformers.set_seed(seed)  # fitting the head may have drawn random numbers
        trainer.train(resume_from_checkpoint=last)
        return trainer

    def _sharpness(self, rows: Sequence[dict[str, Any]]) -> float:
        """Return the factor of the logits with the lowest log loss on rows that a training has not seen.

        Returns 1 if there are too few rows.
        """
        some = random.Random(self._options.seed).sample(rows, min(len(rows), MAX_VALIDATED))
        if len(some) < MIN_VALIDATED:
            return 1.0
        held_out, learnt = some[: len(some) // FOLDS], some[len(some) // FOLDS :]
        model = self._train(learnt, "measuring how large the logits are on unseen posts", keep=False).model
        logits = torch.cat([outputs["logits"].float().cpu() for outputs in self._passes(model, held_out)])
        expected = torch.tensor([row["labels"] for row in held_out])
        return best_sharpness(logits, expected)

    def _save(self, model: Any, folder: Path) -> None:
        """Save a folder of transformers: safetensors, configuration with labels, tokenizer; or of sentence-transformers
        with a head.
        """
        self._tokenizer.backend_tokenizer.no_truncation()  # do not save the settings used for training
        self._tokenizer.backend_tokenizer.no_padding()
        if self._layout:
            model.network.model.save_pretrained(folder)
        else:
            model.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            weights.chmod((folder / "config.json").stat().st_mode)  # written as owner-only, but other users serve it
        if self._layout:
            head, most = (model.last.weight.detach(), model.last.bias.detach()), self._options.max_tokens
            save_with_head(folder, self._dataset.labels, head, self._weights, self._settings, most)

    def _last_checkpoint(self) -> str | None:
        """Return the last checkpoint of an interrupted training, if any. Raises UserError if that training differs."""
        folder = Path(self._options.out) / CHECKPOINTS
        record = folder / "begun.json"
        begun = json.dumps({"options": asdict(self._options), "examples": self._dataset.digest})
        if not record.exists():
            folder.mkdir(parents=True, exist_ok=True)
            record.write_text(begun)
        elif record.read_text() != begun:
            raise UserError(
                f"{folder.parent} contains a training that was interrupted, with other options or posts. Give the same "
                "to continue it, or delete the folder."
            )
        complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]  # written last
        return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None

    def _plan(self) -> dict[str, Any]:
        """Return and print the plan."""
        options = self._options
        batch = options.batch_size * options.accumulation
        steps = self._steps(len(self._dataset.train))
        precision = f"{str(self._precision).removeprefix('torch.')}: {self._why_precision}"
        self._report.print(
            f"Effective batch {batch} = {options.batch_size} × {options.accumulation} accumulated; "
            f"{steps:,} optimization steps, {options.epochs:.3g} epochs; {self._device.name} in {precision}"
        )
        return {
            "classifier": "head" if self._layout else "sequence",
            "precision": precision,
            "device": self._device.name,
            "effective_batch": batch,
            "steps": steps,
        }

    def _steps(self, rows: int) -> int:
        """Return the number of optimization steps of a training on so many rows."""
        return math.ceil(
            self._options.epochs * math.ceil(rows / (self._options.batch_size * self._options.accumulation))
        )

    def _tokens(self, texts: Iterable[str], prompt: str) -> Any:
        """Tokenize texts as a worker does. prompt: prefix of each text."""
        read = [prompt + text for text in texts]
        lower = self._layout and self._layout.texts.lower_case
        return self._tokenizer([text.lower() for text in read] if lower else read, truncation=True)

    def _rows(self, examples: Sequence[Labelled]) -> list[dict[str, Any]]:
        prompt = self._layout.texts.post_prompt if self._layout else ""
        columns = dict(self._tokens((example.post.text for example in examples), prompt))
        columns["labels"] = self._dataset.targets(examples, self._options)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _arguments(self, keep: bool) -> TrainingArguments:
        options = self._options
        on_gpu = self._device.torch.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device.torch.index or 0)
        arguments = TrainingArguments(
            output_dir=str(Path(options.out) / CHECKPOINTS),
            per_device_train_batch_size=options.batch_size,
            gradient_accumulation_steps=options.accumulation,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            weight_decay=WEIGHT_DECAY,
            warmup_steps=WARMUP,
            max_grad_norm=1.0,
            bf16=self._precision is torch.bfloat16,
            fp16=self._precision is torch.float16,
            dataloader_pin_memory=on_gpu,
            remove_unused_columns=False,
            label_names=["labels"],
            use_cpu=self._device.torch.type == "cpu",
            seed=options.seed,
            logging_steps=1 / CURVE_POINTS,
            report_to=[],
            disable_tqdm=True,
            save_strategy="epoch" if keep else "no",
            save_total_limit=2,  # a crash can leave the last one incomplete
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs would share the interpreter lock
        return arguments

    @staticmethod
    def _loss_of_step(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the rows' share of the mean loss over all rows of the optimization step."""
        losses = loss_of_rows(outputs["logits"].float(), labels)
        if num_items_in_batch is None:
            return losses.mean()
        # The Trainer counts label values, of which each row has one per label.
        rows: torch.Tensor = num_items_in_batch / labels.shape[1]
        return losses.sum() / rows

    def _last_layer(self, model: Any) -> Any:
        """Return the last linear layer; None if it does not give the logits of the labels."""
        last = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][-1]
        return last if last.out_features == len(self._dataset.labels) else None

    @torch.no_grad()
    def _passes(self, model: Any, rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
        """Yield the outputs of a model for rows, in small batches in order."""
        model.eval()
        place = next(model.parameters()).device
        for start in range(0, len(rows), HEAD_BATCH_SIZE):
            batch = self._collate([dict(row) for row in rows[start : start + HEAD_BATCH_SIZE]])
            yield model(**{name: value.to(place) for name, value in batch.items() if name != "labels"})

    @torch.no_grad()
    def _fit_head(self, model: Any, train: Sequence[dict[str, Any]]) -> None:
        """Fit the last linear layer to its inputs for the training rows.

        Leaves the model unchanged if its last layer does not return logits of [rows, labels].
        """
        last = self._last_layer(model)
        if last is None:
            return
        some = random.Random(self._options.seed).sample(train, min(len(train), MAX_HEAD_EXAMPLES))
        some.sort(key=lambda row: len(row["input_ids"]))
        inputs: list[torch.Tensor] = []
        hook = last.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
        for _ in self._passes(model, some):
            pass
        hook.remove()
        features, wanted = torch.cat(inputs).cpu().float(), torch.tensor([row["labels"] for row in some])
        if features.shape[:-1] != wanted.shape[:1]:
            return
        sentences = self._label_vectors(model, self._layout.texts.label_prompt) if self._layout else None
        weight, bias = fit(features, wanted, sentences, self._options.seed).head
        last.weight.copy_(weight)
        if last.bias is not None:
            last.bias.copy_(bias)

    def _label_vectors(self, model: Pooled, prompt: str) -> torch.Tensor:
        """Return the unit vectors of the labels' descriptions: [labels, dimensions], on the CPU.

        prompt: prefix of each sentence.
        """
        vectors, place = [], next(model.parameters()).device
        for texts in described(self._dataset.labels, self._settings).values():
            rows = self._tokens((DEFAULT_TEMPLATE.replace("{}", text) for text in texts), prompt)
            vectors.append(model.embed(**self._tokenizer.pad(rows, return_tensors="pt").to(place)).mean(0))
        return normalize(torch.stack(vectors), dim=-1).cpu()


class Order(LengthGroupedSampler):
    """A reproducible order of examples, different in each epoch and determined by the seed.

    batch: examples per optimization step. Examples of similar length are in one step, so that its
    forward passes need little padding. The longest example is in the first step, so that running out of memory shows at
    once; the others come in random order, but an incomplete one stays at the end.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        super().__init__(batch, lengths=lengths)
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        order: list[int] = get_length_grouped_indices(  # type: ignore[no-untyped-call]
            self.lengths, self.batch_size, STEPS_SORTED_TOGETHER, generator
        )
        first, *others = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        places = torch.randperm(max(0, len(others) - 1), generator=generator).tolist()
        steps = [first, *(others[place] for place in places), *others[-1:]]
        return iter([example for step in steps for example in step])


class _Trainer(Trainer):
    """A Trainer that uses our `Order`."""

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> Order:  # type: ignore[override]  # noqa: ARG002
        rows: Any = self.train_dataset
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return Order([len(row["input_ids"]) for row in rows], batch, self.args.seed)


class _Progress(TrainerCallback):
    """Report each optimization step."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self._report.advance(state.global_step, f", loss {losses[-1]:.3f}" if losses else "")


def _embeds(weights: Weights) -> bool:
    """Return whether a model is a sentence encoder, with or without a head."""
    with suppress(ModelError):
        return classifier_kind(weights) in ("similarity", "head")
    return False


def _tokenizer(weights: Weights, most: int) -> Any:
    """Load the base's tokenizer, set to truncate to `most` tokens or the base's lower limit. Raises ModelError."""
    tokenizer = load_tokenizer(weights)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    takes = max_row_tokens(read_config(weights))
    # Saved with the model, so that workers truncate texts as training did.
    tokenizer.model_max_length = min(most, tokenizer.model_max_length, takes or most)
    return tokenizer


def make_model(weights: Weights, labels: Sequence[str], pad_id: int) -> Any:
    """Load the base in float32 with a head for these labels. A head of the same size in the base is kept.

    Raises ModelError.
    """
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the head is new on purpose
    model, _ = load_pretrained(
        AutoModelForSequenceClassification,
        weights,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: place for place, label in enumerate(labels)},
        problem_type="single_label_classification",
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
    )
    model.config.pad_token_id = padding_token(model.config, pad_id)
    return model
