"""Fine-tune a classifier with transformers' Trainer: examples and options in, weights out.

A sentence-transformers base keeps its pooling and gets a head on its unit vectors (`Pooled`), any
other base becomes transformers' sequence classifier. Differences from the plain Trainer:

- the new head is fitted to the base's features first. A random one sends large, undirected
  gradients into the base, which distorts its features ("Fine-Tuning can Distort Pretrained
  Features", arXiv 2202.10054);
- posts that fit none of the labels are a further class, the last output. Workers turn it into
  posts without a label (`fixed_labels.py`);
- the logits are scaled at the end: a second training, on four fifths of at most MAX_VALIDATED
  examples, shows by the log loss of the others by how much a training makes them too large
  (temperature scaling, see `head.py`);
- seed and epoch alone decide the order of examples (`Order`); the Trainer's grouping by length
  draws from the global generator. Resumed and accumulated runs therefore see the same batches;
- the loss is a sum divided by the examples of the whole optimization step, so gradient
  accumulation is exact, and several processes learn what one would (`distributed`);
- a batch that runs out of memory is halved and the accumulation doubled; the training then
  continues from its last checkpoint.

Relies on these private names of transformers: `_get_train_sampler` and `_load_from_checkpoint` of
the Trainer, and `_n_gpu` of its arguments.
"""

import gc
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.functional import normalize
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from feedmill.console import Report
from feedmill.producers.records import Labelled
from feedmill.shared.atomic_files import replacing
from feedmill.shared.errors import DeviceFull, ModelError, UserError, printable
from feedmill.shared.none_of_these import DEFAULT_NONE_ALONE, NO_LABEL
from feedmill.shared.settings import Settings
from feedmill.training import distributed
from feedmill.training.batches import (
    BatchSize,
    Order,
    ignored_row,
    said_of_smaller_batch,
)
from feedmill.training.data import CHECKPOINTS, Dataset
from feedmill.training.head import (
    FOLDS,
    MAX_VALIDATED,
    best_sharpness,
    described,
    fit,
    loss_of_rows,
    save_with_head,
)
from feedmill.training.history import (
    EpochLog,
    EpochSize,
    Patience,
    best_step,
    epochs_without_gain,
    summary,
)
from feedmill.training.none_class import Promise, promise_of
from feedmill.training.options import TrainOptions
from feedmill.training.trainer_options import environment, parse, typed
from feedmill.tuning.trials import MemoryMeter
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.fixed_labels import (
    NONE_CONFIG_KEY,
    NoneClass,
)
from feedmill.workers.models.classifiers.layout import Layout, read_layout
from feedmill.workers.models.classifiers.none_of_these import read_subjects
from feedmill.workers.models.classifiers.registry import check_size, classifier_kind
from feedmill.workers.models.classifiers.similarity import DEFAULT_TEMPLATE
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.engines.network import (
    Network,
    load_pretrained,
    max_row_tokens,
    padding_token,
    separates_rows,
)
from feedmill.workers.models.engines.torch_engine import create_engine
from feedmill.workers.models.tokenizer import load_tokenizer
from feedmill.workers.models.weights import Weights, locate, read_config

#: Rows per forward pass when fitting the head. Fixed, so that the head does not depend on the
#: batch size.
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
#: Share of the training posts that evaluations hold out.
EVALUATED_SHARE = 0.1
#: Least training posts for an evaluation: it holds out two of them.
MIN_EVALUATED = 20
#: File of the Trainer's state in a checkpoint, which is written last.
STATE_FILE = "trainer_state.json"


#: A tokenized example: its columns, such as input_ids and labels.
Row = dict[str, Any]


class Pooled(torch.nn.Module):
    """A sentence encoder as the classifier `similarity` runs it, and a linear layer for the labels
    on its unit vectors.

    Dense layers and normalisations of the base stay as they are. Raises ModelError if the folder
    holds no such model.
    """

    def __init__(
        self, weights: Weights, layout: Layout, labels: int, pad_id: int
    ) -> None:
        super().__init__()
        self.network = Network(
            weights,
            torch.float32,
            layout.pooling,
            pad_id,
        )
        steps = torch.nn.ModuleList(layout.steps)
        self.steps = steps.requires_grad_(False)
        self._dimensions = layout.truncate_dim
        padding = torch.tensor([[pad_id]])
        mask = torch.tensor([[1]])
        with torch.no_grad():
            width = self.embed(padding, mask).shape[1]
        self.last = torch.nn.Linear(width, labels)

    def embed(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return unit vectors: [rows, dimensions].

        The inputs are those of transformers: [rows, tokens].
        """
        vectors = self.network(
            input_ids,
            attention_mask.bool(),
            token_type_ids,
            attention_mask,
        )
        for step in self.steps:
            vectors = step(vectors)
        truncated = vectors[:, : self._dimensions]
        return normalize(truncated.float(), dim=-1)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the logits, [rows, labels] in float32, as transformers names them.

        Takes what `embed` takes.
        """
        vectors = self.embed(input_ids, attention_mask, token_type_ids)
        with torch.autocast(vectors.device.type, enabled=False):
            return {"logits": self.last(vectors)}

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Compute activations again in the backward pass instead of keeping them.

        The Trainer calls this.
        """
        self.network.model.activation_checkpointing_enable(**options)


class Trained(NamedTuple):
    """Result of a training run. save: writes the model's folder; raises OSError."""

    model: Any
    tokenizer: Any
    #: The training's part of training.json: the plan, and what `history.summary` tells.
    record: dict[str, Any]
    save: Callable[[Path], None]


class Training:
    """One training run, in one process or one of several. Raises UserError if it cannot start.

    batch: sizes to start with instead of those in the options.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: TrainOptions,
        settings: Settings,
        report: Report,
        batch: BatchSize | None = None,
    ) -> None:
        self._dataset = dataset
        #: The names of the outputs: the labels and, if there are posts for it, the none-class.
        self._names = output_names(dataset)
        self._options = options
        self._settings = settings
        self._report = report
        if batch is None:
            batch = BatchSize(
                rows=options.batch_size,
                accumulation=options.accumulation,
                processes=distributed.processes(),
            )
        self._batch = batch
        #: Batch sizes that ran out of memory.
        self._too_large: list[int] = []
        self._pairs = parse(options.trainer or ())
        #: Arguments of the Trainer that --trainer sets.
        self._chosen = typed(self._pairs)
        os.environ.update(environment(self._pairs))
        self._device = device.select_device(settings.device, "float32")
        self._precision, self._why_precision = device.for_training(
            self._device,
            settings.dtype,
        )
        self._weights = locate(
            options.base,
            settings.revision,
            settings.trust_remote_code,
        )
        check_size(self._weights, self._device)
        self._tokenizer = _tokenizer(self._weights, options.max_tokens)
        self._layout = _embedding_layout(self._weights, settings)
        if self._layout and self._layout.texts.max_tokens:
            self._tokenizer.model_max_length = min(
                self._tokenizer.model_max_length,
                self._layout.texts.max_tokens,
            )
        self._check_separation()
        on_gpu = self._device.torch.type == "cuda"
        self._collate = DataCollatorWithPadding(
            self._tokenizer,
            pad_to_multiple_of=8 if on_gpu else None,
        )

    def _check_separation(self) -> None:
        """Raise ModelError if rows change each other's outputs: a worker would refuse the trained
        model, hours later.
        """
        if separates_rows(self._weights, read_config(self._weights)):
            return
        in_torch = self._settings.model_copy(update={"engine": "torch"})
        # Measures the encoder.
        create_engine(
            self._weights,
            self._device,
            in_torch,
            ("mean",),
            self._tokenizer.model_max_length,
        )

    def run(self) -> Trained:
        """Train the model. Raises UserError, DeviceFull or DeviceLost."""
        began = time.monotonic()
        begin(self._options, self._dataset, self._batch.processes)
        examples = [*self._dataset.train, *self._dataset.none_train]
        self._report.phase(f"tokenizing {len(examples):,} posts")
        with device_errors(), distributed.explain_lost_peers():
            rows, held_out = self._divide(self._rows(examples))
            self._print_plan(len(rows))
            first_step = _step_of(self._last_checkpoint())
            trainer = self._train(rows, "training", held_out=held_out)
            model = trainer.accelerator.unwrap_model(trainer.model)
            state = trainer.state
            kept_step: int | None = state.global_step
            if self._options.patience:
                kept_step = best_step(state.log_history)
            plan = self._plan(len(rows))
            layer = self._last_layer(model)
            promise = Promise(DEFAULT_NONE_ALONE)
            if layer is not None:  # else no layer could be scaled
                outputs = self._unseen_outputs(rows, kept_step)
                sharpness = 1.0
                if outputs is not None:
                    logits, targets = outputs
                    sharpness = best_sharpness(logits, targets)
                    promise = self._promise(sharpness * logits)
                plan["sharpness"] = sharpness
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.mul_(sharpness)
            if self._has_none:
                plan["none"] = promise._asdict()
        record = {
            "plan": plan,
            "seconds": time.monotonic() - began,
            "resumed_at_step": first_step,
            "steps": state.global_step,
            "kept_step": kept_step,
            "stopped_early": self._has_stopped_early(state.log_history),
            "evaluated_on": len(held_out),
            **summary(state.log_history),
        }

        def save(folder: Path) -> None:
            self._save(model.to("cpu"), folder, promise)

        return Trained(
            model=model,
            tokenizer=self._tokenizer,
            record=record,
            save=save,
        )

    def _divide(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Return the rows to learn from, and those for evaluations.

        Raises UserError if there are too few.
        """
        if self._options.evaluate == "none":
            return list(rows), []
        if len(rows) < MIN_EVALUATED:
            raise UserError(
                f"--eval needs at least {MIN_EVALUATED} posts for training, not {len(rows)}: it "
                "holds out a tenth. Add posts, or leave out --eval."
            )
        count = round(len(rows) * EVALUATED_SHARE)
        generator = random.Random(self._options.seed)
        indexes = set(generator.sample(range(len(rows)), count))
        learnt = []
        held_out = []
        for index, row in enumerate(rows):
            if index in indexes:
                held_out.append(row)
            else:
                learnt.append(row)
        return learnt, held_out

    def _train(
        self,
        rows: Sequence[Row],
        phase: str,
        held_out: Sequence[Row] = (),
        keep: bool = True,
        steps: int | None = None,
    ) -> Any:
        """Train on these rows, with smaller batches if the device runs out of memory; return the
        Trainer.

        held_out: rows for evaluations. keep: write checkpoints, and continue from the last one.
        steps: number of optimization steps, instead of that in the options. Raises DeviceFull if
        one row is too much, or if there are several processes: all of them must then start again.
        """
        while True:
            try:
                with device_errors():
                    return self._train_once(
                        rows,
                        phase,
                        held_out,
                        keep,
                        steps,
                    )
            except DeviceFull as error:
                smaller = self._batch.smaller()
                if smaller is None or self._batch.processes > 1:
                    raise
                note = said_of_smaller_batch(self._batch, smaller, str(error))
                self._report.print(note)
            self._too_large.append(self._batch.rows)
            self._batch = smaller
            gc.collect()  # the failed Trainer's model and optimizer refer to each other
            self._device.give_back()

    def _train_once(
        self,
        rows: Sequence[Row],
        phase: str,
        held_out: Sequence[Row],
        keep: bool,
        steps: int | None,
    ) -> Any:
        """Fit the head of a new model, then train all weights; see `_train`."""
        seed = self._options.seed
        transformers.set_seed(seed)
        self._report.phase(f"loading {self._weights.name}")
        pad_id = self._tokenizer.pad_token_id
        checkpoint = self._last_checkpoint() if keep else None
        planned_steps = steps or self._steps(len(rows))
        arguments = self._arguments(keep, steps)
        if self._layout:
            model: Any = Pooled(
                self._weights,
                self._layout,
                len(self._names),
                pad_id,
            )
        else:
            model = make_model(self._weights, self._names, pad_id)
        model.to(arguments.device)
        if checkpoint is None:
            self._report.phase("fitting the head")
            self._fit_head(model, rows)
        trainer = self._trainer(
            model,
            arguments,
            rows,
            held_out,
        )
        if checkpoint is not None:
            folder = Path(checkpoint)
            state = TrainerState.load_from_json(str(folder / STATE_FILE))
            if self._is_complete(state, planned_steps):
                trainer.restore(state, self._kept_checkpoint(folder, state))
                return trainer
        self._report.phase(phase, planned_steps)
        transformers.set_seed(seed)  # fitting the head may have drawn random numbers
        with explain_trainer(self._pairs):
            trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    def _trainer(
        self,
        model: Any,
        arguments: TrainingArguments,
        rows: Sequence[Row],
        held_out: Sequence[Row],
    ) -> "_Trainer":
        epoch_log = EpochLog(
            self._report,
            MemoryMeter(self._device.torch),
            self._epoch(len(rows)),
        )
        callbacks: list[Any] = [epoch_log]
        patience = self._options.patience
        if patience and held_out:
            callbacks.append(Patience(patience))
        with explain_trainer(self._pairs, RuntimeError):
            trainer = _Trainer(
                model=model,
                args=arguments,
                train_dataset=[*rows, ignored_row(rows)],
                eval_dataset=list(held_out) or None,
                data_collator=self._collate,
                compute_loss_func=self._loss_of_step,
                compute_metrics=_evaluation_metrics,
                preprocess_logits_for_metrics=_only_logits,
                callbacks=callbacks,
            )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer

    def _is_complete(self, state: TrainerState, planned: int) -> bool:
        """Return whether a checkpoint's training has nothing left to do."""
        if state.global_step >= planned:
            return True
        return self._has_stopped_early(state.log_history)

    def _has_stopped_early(self, history: Sequence[dict[str, Any]]) -> bool:
        patience = self._options.patience
        if patience is None:
            return False
        return epochs_without_gain(history) >= patience

    def _kept_checkpoint(self, last: Path, state: TrainerState) -> Path:
        """Return the checkpoint of the best evaluation, if --patience asks for it, else the last
        one.
        """
        if self._options.patience is None:
            return last
        step = best_step(state.log_history)
        best = last.with_name(f"checkpoint-{step}")
        if (best / STATE_FILE).exists():
            return best
        return last

    def _unseen_outputs(
        self, rows: Sequence[Row], kept_step: int | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the logits and the targets of rows that another training has not seen; None if
        there are too few rows.

        kept_step: the step of the model. The other training has as many epochs.
        """
        sample = self._sample(rows, MAX_VALIDATED)
        if len(sample) < MIN_VALIDATED:
            return None
        border = len(sample) // FOLDS
        held_out = sample[:border]
        learnt = sample[border:]
        epochs = 0.0
        if kept_step is not None:
            epochs = kept_step / self._epoch(len(rows)).steps_per_epoch
        learnt_epoch = self._epoch(len(learnt))
        steps = math.ceil(epochs * learnt_epoch.steps_per_epoch)
        phase = "measuring how large the logits are on unseen posts"
        model = self._train(
            learnt,
            phase,
            keep=False,
            steps=max(1, steps),
        ).model
        batches = []
        for outputs in self._passes(model, held_out):
            logits = outputs["logits"].float()
            batches.append(logits.cpu())
        targets = [row["labels"] for row in held_out]
        return torch.cat(batches), torch.tensor(targets)

    def _sample(self, rows: Sequence[Row], most: int) -> list[Row]:
        """Return at most so many rows, drawn by the seed."""
        generator = random.Random(self._options.seed)
        return generator.sample(rows, min(len(rows), most))

    def _epoch(self, rows: int) -> EpochSize:
        """Return the size of an epoch of so many rows."""
        return EpochSize(rows=rows, effective_batch=self._batch.effective)

    def _promise(self, logits: torch.Tensor) -> Promise:
        """Return the threshold of the none-class, and what to expect of it.

        logits: the outputs for rows that were not learnt from.
        """
        count = len(self._dataset.labels)
        outcomes = logits.softmax(-1)
        label_scores = outcomes[:, :count]
        best_scores = label_scores.amax(1)
        return promise_of(best_scores)

    @property
    def _has_none(self) -> bool:
        """True if the last output is the none-class."""
        outputs = len(self._names)
        labels = len(self._dataset.labels)
        return outputs > labels

    def _save(self, model: Any, folder: Path, promise: Promise) -> None:
        """Save a folder of transformers: safetensors, configuration with labels, tokenizer; or of
        sentence-transformers with a head.

        promise: that of the none-class, if there is one.
        """
        # do not save the settings used for training
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        if self._layout:
            model.network.model.save_pretrained(folder)
        else:
            if self._has_none:
                setattr(model.config, NONE_CONFIG_KEY, promise._asdict())
            model.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            # written as owner-only, but other users serve it
            config = folder / "config.json"
            weights.chmod(config.stat().st_mode)
        if self._layout:
            labels = self._dataset.labels
            count = len(labels)
            weight = model.last.weight.detach()
            bias = model.last.bias.detach()
            none_class = None
            if self._has_none:
                none_class = NoneClass(
                    weight=weight[count:],
                    bias=bias[count:],
                    **promise._asdict(),
                )
            save_with_head(
                folder,
                labels,
                (weight[:count], bias[:count]),
                self._weights,
                self._settings,
                self._options.max_tokens,
                none_class,
            )

    def _last_checkpoint(self) -> str | None:
        """Return the last complete checkpoint of an interrupted training, if any."""
        folder = Path(self._options.out) / CHECKPOINTS
        states = folder.glob(f"checkpoint-*/{STATE_FILE}")
        complete = [str(path.parent) for path in states]
        if complete:
            return max(complete, key=lambda checkpoint: _step_of(checkpoint) or 0)
        return None

    def _plan(self, rows: int) -> dict[str, Any]:
        """Return the plan, as training.json has it."""
        return {
            "classifier": "head" if self._layout else "sequence",
            "precision": self._described_precision,
            "device": self._device.name,
            "devices": self._batch.processes,
            "effective_batch": self._batch.effective,
            "batch_size": self._batch.rows,
            "accumulation": self._batch.accumulation,
            "out_of_memory": self._too_large,
            "steps": self._steps(rows),
        }

    def _print_plan(self, rows: int) -> None:
        steps = self._steps(rows)
        epochs = self._options.epochs
        if "max_steps" in self._chosen:
            epochs = steps / self._epoch(rows).steps_per_epoch
        self._report.print(
            f"Effective batch {self._batch}; {steps:,} optimization steps, {epochs:.3g} epochs; "
            f"{self._device.name} in {self._described_precision}"
        )

    @property
    def _described_precision(self) -> str:
        name = str(self._precision).removeprefix("torch.")
        return f"{name}: {self._why_precision}"

    def _steps(self, rows: int) -> int:
        """Return the number of optimization steps of a training on so many rows."""
        max_steps: int | None = self._chosen.get("max_steps")
        if max_steps is not None:
            return max_steps
        steps_per_epoch = self._epoch(rows).steps_per_epoch
        return math.ceil(self._options.epochs * steps_per_epoch)

    def _tokens(self, texts: Iterable[str], prompt: str) -> Any:
        """Tokenize texts as a worker does. prompt: prefix of each text."""
        inputs = [prompt + text for text in texts]
        if self._layout and self._layout.texts.lower_case:
            inputs = [text.lower() for text in inputs]
        return self._tokenizer(inputs, truncation=True)

    def _rows(self, examples: Sequence[Labelled]) -> list[Row]:
        prompt = ""
        if self._layout:
            prompt = self._layout.texts.post_prompt
        texts = [example.post.text for example in examples]
        columns = dict(self._tokens(texts, prompt))
        columns["labels"] = self._dataset.outcome_targets(self._options)
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _arguments(self, keep: bool, steps: int | None) -> TrainingArguments:
        """Return the Trainer's arguments. keep: write checkpoints and evaluate. steps: see
        `_train`.
        """
        options = self._options
        evaluates = keep and options.evaluate == "epoch"
        torch_device = self._device.torch
        on_gpu = torch_device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(torch_device.index or 0)
        values: dict[str, Any] = {
            "weight_decay": WEIGHT_DECAY,
            "warmup_steps": WARMUP,
            "max_grad_norm": 1.0,
            "per_device_eval_batch_size": self._batch.rows,
            "dataloader_pin_memory": on_gpu,
            "logging_steps": 1 / CURVE_POINTS,
            "report_to": [],
            **self._chosen,
            "output_dir": str(Path(options.out) / CHECKPOINTS),
            "per_device_train_batch_size": self._batch.rows,
            "gradient_accumulation_steps": self._batch.accumulation,
            "num_train_epochs": options.epochs,
            "learning_rate": options.learning_rate,
            "bf16": self._precision is torch.bfloat16,
            "fp16": self._precision is torch.float16,
            "remove_unused_columns": False,
            "label_names": ["labels"],
            "use_cpu": torch_device.type == "cpu",
            "seed": options.seed,
            "disable_tqdm": True,
            "save_strategy": "epoch" if keep else "no",
            "save_total_limit": 2,  # a crash can leave the last one incomplete
            "eval_strategy": "epoch" if evaluates else "no",
        }
        if evaluates and options.patience:
            values |= {
                "load_best_model_at_end": True,
                "metric_for_best_model": "log_loss",
                "greater_is_better": False,
            }
        if steps is not None:
            values["max_steps"] = steps
        if not keep:
            values["report_to"] = []  # of the training, not of its calibration
        if self._batch.processes > 1 and not on_gpu:
            values["ddp_backend"] = "gloo"
        with explain_trainer(self._pairs, RuntimeError):
            arguments = TrainingArguments(**values)
        # Several GPUs would share the interpreter lock.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        return arguments

    @staticmethod
    def _loss_of_step(
        outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the rows' share of the mean loss over all rows of the optimization step."""
        logits = outputs["logits"].float()
        targets = labels.clamp(min=0)  # see IGNORED
        losses = loss_of_rows(logits, targets)
        if num_items_in_batch is None:
            return losses.mean()
        # The Trainer counts label values, of which each row has one per label.
        label_count = labels.shape[1]
        rows: torch.Tensor = num_items_in_batch / label_count
        return losses.sum() / rows

    def _last_layer(self, model: Any) -> Any:
        """Return the last linear layer; None if it does not give the logits of the outputs."""
        layers = [
            module for module in model.modules() if isinstance(module, torch.nn.Linear)
        ]
        last = layers[-1]
        if last.out_features != len(self._names):
            return None
        return last

    @torch.no_grad()
    def _passes(self, model: Any, rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
        """Yield the outputs of a model for rows, in small batches in order."""
        model.eval()
        model_device = next(model.parameters()).device
        for start in range(0, len(rows), HEAD_BATCH_SIZE):
            batch = rows[start : start + HEAD_BATCH_SIZE]
            columns = self._collate([dict(row) for row in batch])
            inputs = {}
            for name, column in columns.items():
                if name != "labels":
                    inputs[name] = column.to(model_device)
            yield model(**inputs)

    @torch.no_grad()
    def _fit_head(self, model: Any, train: Sequence[dict[str, Any]]) -> None:
        """Fit the last linear layer to its inputs for the training rows.

        Leaves the model unchanged if its last layer does not return logits of [rows, labels].
        """
        last = self._last_layer(model)
        if last is None:
            return
        sample = self._sample(train, MAX_HEAD_EXAMPLES)
        sample.sort(key=lambda row: len(row["input_ids"]))
        inputs: list[torch.Tensor] = []

        def note_input(_: Any, arguments: Any) -> None:
            inputs.append(arguments[0].detach())

        hook = last.register_forward_pre_hook(note_input)
        for _ in self._passes(model, sample):
            pass
        hook.remove()
        features = torch.cat(inputs).cpu().float()
        targets = torch.tensor([row["labels"] for row in sample])
        if features.shape[:-1] != targets.shape[:1]:
            return
        sentences = None
        if self._layout:
            sentences = self._label_vectors(model, self._layout.texts.label_prompt)
        fitted = fit(
            features,
            targets,
            sentences,
            self._options.seed,
        )
        weight, bias = fitted.head
        last.weight.copy_(weight)
        if last.bias is not None:
            last.bias.copy_(bias)

    def _label_vectors(self, model: Pooled, prompt: str) -> torch.Tensor:
        """Return the unit vectors of the outputs' descriptions: [outputs, dimensions], on the CPU.

        The none-class is about all everyday subjects. prompt: prefix of each sentence.
        """
        vectors = []
        model_device = next(model.parameters()).device
        label_descriptions = described(self._dataset.labels, self._settings)
        all_descriptions: list[Sequence[str]] = list(label_descriptions.values())
        if self._has_none:
            subjects = read_subjects()
            all_descriptions.append(list(subjects))
        for descriptions in all_descriptions:
            sentences = [DEFAULT_TEMPLATE.replace("{}", text) for text in descriptions]
            rows = self._tokens(sentences, prompt)
            batch = self._tokenizer.pad(rows, return_tensors="pt")
            sentence_vectors = model.embed(**batch.to(model_device))
            vectors.append(sentence_vectors.mean(0))
        unit_vectors = normalize(torch.stack(vectors), dim=-1)
        return unit_vectors.cpu()


class _Trainer(Trainer):
    """A Trainer that uses our `Order`. The last row of its data set fills up batches."""

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> Order:  # type: ignore[override]  # noqa: ARG002
        arguments = self.args
        rows: Any = self.train_dataset
        micro_batch = arguments.per_device_train_batch_size * arguments.world_size
        step = micro_batch * arguments.gradient_accumulation_steps
        lengths = [len(row["input_ids"]) for row in rows[:-1]]
        return Order(
            lengths,
            step,
            arguments.seed,
            multiple=micro_batch if arguments.world_size > 1 else 1,
        )

    def restore(self, state: TrainerState, checkpoint: Path) -> None:
        """Load a checkpoint's weights instead of training. state: that of the complete
        training.
        """
        self._load_from_checkpoint(str(checkpoint))
        self.state = state


def output_names(dataset: Dataset) -> tuple[str, ...]:
    """Return the labels and, if there are posts that fit none of them, the name of the
    none-class: no label's.
    """
    names = dataset.labels
    if not dataset.none_train:
        return names
    none_name = NO_LABEL
    while none_name in names:
        none_name += " at all"
    return (*names, none_name)


def check(options: TrainOptions) -> None:
    """Check the values of --trainer before processes are started. Raises UserError."""
    pairs = parse(options.trainer or ())
    values = typed(pairs)
    values["report_to"] = []
    with tempfile.TemporaryDirectory() as folder, explain_trainer(pairs, RuntimeError):
        TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            **values,
        )


def begin(options: TrainOptions, dataset: Dataset, processes: int = 1) -> None:
    """Note what is trained in the folder of the checkpoints, or check that an interrupted training
    is the same.

    Only rank 0 writes. Raises UserError if the interrupted training had other options, posts or
    devices, and has a checkpoint.
    """
    folder = Path(options.out) / CHECKPOINTS
    record = folder / "begun.json"
    begun = {
        "options": asdict(options),
        "examples": dataset.digest,
        "processes": processes,
    }
    checkpoints = folder.glob(f"checkpoint-*/{STATE_FILE}")
    if not record.exists() or not any(checkpoints):
        if distributed.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(record) as temporary:
                temporary.write_text(json.dumps(begun))
        return
    before = json.loads(record.read_text())
    # Written by an earlier version, which lacked some options.
    before.setdefault("processes", 1)
    for field in fields(TrainOptions):
        before["options"].setdefault(field.name, field.default)
    # JSON has lists for tuples.
    now = json.loads(json.dumps(begun))
    if before != now:
        raise UserError(
            f"{folder.parent} contains a training that was interrupted, with other options, posts "
            "or devices. Give the same to continue it, or delete the folder."
        )


@contextmanager
def explain_trainer(
    pairs: Mapping[str, str], *others: type[Exception]
) -> Iterator[None]:
    """Raise UserError for values of --trainer that transformers refuses. others: more errors that
    mean so.
    """
    refusals: tuple[type[Exception], ...] = (
        ValueError,
        TypeError,
        ImportError,
        *others,
    )
    try:
        yield
    except refusals as error:
        if not pairs or isinstance(error, torch.OutOfMemoryError):
            raise
        values = " ".join(f"{key}={value}" for key, value in pairs.items())
        words = str(error).split()
        reason = " ".join(words)
        raise UserError(
            f"transformers refuses --trainer {printable(values):.200}: {printable(reason):.300}"
        ) from error


def _evaluation_metrics(evaluation: Any) -> dict[str, float]:
    """Return the log loss and the accuracy of an evaluation, for the Trainer."""
    logits = torch.as_tensor(evaluation.predictions).float()
    targets = torch.as_tensor(evaluation.label_ids).float()
    log_losses = loss_of_rows(logits, targets)
    log_loss = log_losses.sum() / targets.sum()
    is_right = logits.argmax(-1) == targets.argmax(-1)
    accuracy = is_right.float().mean()
    return {"log_loss": float(log_loss), "accuracy": float(accuracy)}


def _only_logits(outputs: Any, labels: Any) -> Any:  # noqa: ARG001
    """Return the logits alone: models with a decoder return hidden states after them."""
    if isinstance(outputs, tuple):
        return outputs[0]
    return outputs


def _step_of(checkpoint: str | None) -> int | None:
    """Return the step at which a checkpoint was written."""
    if checkpoint is None:
        return None
    _, _, step = checkpoint.rpartition("-")
    return int(step)


def _embeds(weights: Weights) -> bool:
    """Return whether a model is a sentence encoder, with or without a head."""
    try:
        return classifier_kind(weights) in ("similarity", "head")
    except ModelError:
        return False


def _embedding_layout(weights: Weights, settings: Settings) -> Layout | None:
    """Return the layout of a sentence encoder; None for other models and static embeddings.

    Raises ModelError.
    """
    if not _embeds(weights):
        return None
    layout = read_layout(weights, settings)
    if layout.static:
        return None
    return layout


def _tokenizer(weights: Weights, most: int) -> Any:
    """Load the base's tokenizer, set to truncate to `most` tokens or the base's lower limit.

    Raises ModelError.
    """
    tokenizer = load_tokenizer(weights)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Saved with the model, so that workers truncate texts as training did.
    limit = min(most, tokenizer.model_max_length)
    tokenizer.model_max_length = max_row_tokens(weights, limit)
    return tokenizer


def make_model(weights: Weights, labels: Sequence[str], pad_id: int) -> Any:
    """Load the base in float32 with a head for these labels.

    A head of the same size in the base is kept.

    Raises ModelError.
    """
    # The head is new on purpose.
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    loaded = load_pretrained(
        AutoModelForSequenceClassification,
        weights,
        changes={
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
            "problem_type": "single_label_classification",
        },
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
    )
    model = loaded.model
    model.config.pad_token_id = padding_token(model.config, pad_id)
    return model
