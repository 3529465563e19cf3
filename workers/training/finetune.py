"""Fine-tune a sequence classifier with transformers' Trainer: examples and options in, weights out.

Differences from the plain Trainer:

- the new head is fitted to the base's features first. A random one sends large, undirected gradients into the base,
  which distorts its features ("Fine-Tuning can Distort Pretrained Features", arXiv 2202.10054);
- seed and epoch alone decide the order of examples (`Order`); the Trainer's grouping by length draws from the global
  generator. Resumed, accumulated and multi-process runs therefore see the same batches;
- the loss is a sum divided by the examples of the whole optimization step, so gradient accumulation is exact;
- when a single process runs out of memory, training restarts with the next smaller batch and more accumulation.

With several GPUs, torchrun starts one process per GPU. Every process reads the same examples; only the first one writes
files.
"""

import gc
import logging
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch.utils.data import Sampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from feedmill.shared.errors import DeviceFull, DeviceLost, ModelError, clause
from feedmill.shared.settings import Settings
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.registry import check_size
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.engines.network import PADDING_SENSITIVE_TYPES, max_row_tokens, padding_token, read_config
from feedmill.workers.models.weights import GLICLASS, Weights, locate, read_config_file
from feedmill.workers.pipeline.tuning import Peak
from feedmill.workers.training.examples import Dataset, Example
from feedmill.workers.training.head import fit_logistic, loss_of_rows
from feedmill.workers.training.options import CHECKPOINTS, TrainOptions

logger = logging.getLogger(__name__)

#: Checkpoints kept: a crash can leave the last one incomplete.
MAX_CHECKPOINTS = 2
#: Rows per forward pass when fitting the head. Fixed, so that the head does not depend on the batch size.
HEAD_BATCH_SIZE = 16
#: Maximum examples for fitting the head: enough for its few thousand weights.
MAX_HEAD_EXAMPLES = 20_000
#: Approximate number of points on the loss curve.
CURVE_POINTS = 60
#: Share of the steps with a rising learning rate; it then falls to 0 linearly.
WARMUP = 0.1
#: Learning rate of the head, as a multiple of that of the base.
HEAD_RATE = 10.0
WEIGHT_DECAY = 0.01
#: L2 penalty of the fitted head. With the embedded model and 830 real posts, values from 0.02 to 0.2 differ little;
#: below 0.01 the head overfits.
RIDGE_PENALTY = 0.05
#: Optimization steps whose examples are sorted by length together. More steps reduce padding; fewer add randomness.
STEPS_SORTED_TOGETHER = 32

RowT = TypeVar("RowT")


class Plan(NamedTuple):
    """Batch sizes and steps of a training run."""

    batch_size: int
    accumulation: int
    devices: int
    #: Number of optimization steps.
    steps: int
    epochs: float
    precision: str
    device: str

    @property
    def effective_batch(self) -> int:
        return self.batch_size * self.accumulation * self.devices


class Point(NamedTuple):
    """A point on the loss curves. loss: mean over the training examples since the previous point."""

    step: int
    epoch: float
    loss: float | None
    rate: float | None
    validation_loss: float | None


class TrainingProgress(NamedTuple):
    """State of a run after an optimization step."""

    step: int
    steps: int
    epoch: float
    loss: float | None
    rate: float | None


class Trained(NamedTuple):
    """Result of a training run."""

    model: Any
    tokenizer: Any
    plan: Plan
    curve: list[Point]
    seconds: float
    #: Examples per second, without tokenization and head fitting.
    samples_per_s: float
    #: Peak memory in 10^6 bytes; None if unknown.
    peak_mb: float | None

    def summary(self) -> dict[str, Any]:
        """Return the training's part of the record in training.json."""
        return {
            "plan": self.plan._asdict() | {"effective_batch": self.plan.effective_batch},
            "seconds": self.seconds,
            "samples_per_s": self.samples_per_s,
            "peak_mb": self.peak_mb,
            "curve": [point._asdict() for point in self.curve],
        }


class Training:
    """One training run. Raises UserError if it cannot start.

    planned: called with the plan before the first step, and again after batches were made smaller. progress: called
    after each optimization step. Both are called only in the first process. phase: called with what is done next, until
    the plan is known.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: TrainOptions,
        settings: Settings,
        planned: Callable[[Plan], None] = lambda _: None,
        progress: Callable[[TrainingProgress], None] = lambda _: None,
        phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._dataset, self._options, self._settings = dataset, options, settings
        self._planned, self._progress, self._phase = planned, progress, phase
        self._device = device.select_device(settings.device, "float32")
        self._precision, self._why_precision = device.for_training(self._device, options.precision)
        self._weights = locate(options.base, settings.revision, settings.offline, settings.trust_remote_code)
        check_size(self._weights, self._device)
        self._tokenizer = load_tokenizer(self._weights, options.max_tokens, settings.trust_remote_code)
        self._collate = DataCollatorWithPadding(
            self._tokenizer, pad_to_multiple_of=8 if self._device.torch.type == "cuda" else None
        )
        self._class_weights = torch.tensor(dataset.label_weights) if options.class_weights else None

    def run(self) -> Trained:
        """Train the model. Raises UserError, or ModelError if the device fails."""
        self._phase(f"tokenizing {len(self._dataset.train) + len(self._dataset.validation):,} posts")
        train, validation = self._rows(self._dataset.train), self._rows(self._dataset.validation)
        batch_size, accumulation = self._options.batch_size, self._options.accumulation
        while True:
            try:
                with device_errors():
                    trained = self._train(train, validation, batch_size, accumulation)
                if torch.distributed.is_initialized():
                    gc.collect()  # the wrapped model hangs if it outlives the process group
                    torch.distributed.destroy_process_group()
                return trained
            except DeviceFull as full:
                if "WORLD_SIZE" in os.environ:  # the other processes keep their batch size and wait for this one
                    raise ModelError(
                        f"{self._device.name} is out of memory at --batch-size {batch_size}. Multi-process training "
                        "does not adjust it: set a smaller --batch-size and a larger --accumulation."
                    ) from full
                if batch_size == 1:
                    raise ModelError(
                        f"{self._device.name} is out of memory training {self._weights.name} at --batch-size 1. "
                        "Lower --max-tokens, set --gradient-checkpointing, or use a smaller base."
                    ) from full
                batch_size, accumulation = next_smaller_batch(batch_size, accumulation)
                logger.warning(
                    "out of memory: retrying with batch size %d and accumulation %d",
                    batch_size,
                    accumulation,
                )
                if self._device.torch.type == "cuda":
                    torch.cuda.empty_cache()
            except DeviceLost as lost:
                raise ModelError(
                    f"The device failed: {clause(lost)}. Check the device, then continue the training with --resume."
                ) from None

    def _rows(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        if not examples:
            return []
        tokens = self._tokenizer([example.post.text for example in examples], truncation=True)
        soft = self._options.targets == "soft"
        labels = [self._dataset.target(each, soft) for each in examples]
        columns = {**tokens, "labels": labels}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = None if self._class_weights is None else self._class_weights.to(logits)
        return loss_of_rows(logits, labels, weights)

    def _train(
        self, train: list[dict[str, Any]], validation: list[dict[str, Any]], batch_size: int, accumulation: int
    ) -> Trained:
        options = self._options
        transformers.set_seed(options.seed)
        self._phase(f"loading {self._weights.name}")
        model = make_model(
            self._weights, self._dataset.labels, self._tokenizer.pad_token_id, self._settings.trust_remote_code
        )
        arguments = self._arguments(batch_size, accumulation)
        effective = batch_size * accumulation * arguments.world_size
        steps_an_epoch = math.ceil(len(train) / effective)
        steps = options.max_steps or math.ceil(steps_an_epoch * options.epochs)
        arguments.warmup_steps = round(WARMUP * steps)
        arguments.logging_steps = max(1, steps // CURVE_POINTS)
        order = Order([len(row["input_ids"]) for row in train], effective, options.seed)
        model.to(arguments.device)
        last = self._last_checkpoint()
        if last is None:
            self._phase("fitting the head")
            self._fit_head(model, train)
        trainer = _Trainer(
            order,
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=validation or None,
            data_collator=self._collate,
            compute_loss_func=self._loss_of_step,
            optimizers=(self._optimizer(model), None),
            callbacks=self._callbacks(steps),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        plan = Plan(
            batch_size,
            accumulation,
            arguments.world_size,
            steps,
            steps / steps_an_epoch,
            f"{str(self._precision).removeprefix('torch.')}: {self._why_precision}",
            self._device.name,
        )
        if trainer.is_world_process_zero():
            self._planned(plan)
        peak, began = Peak(self._device.torch, "torch"), time.monotonic()
        transformers.set_seed(options.seed)  # fitting the head may have drawn random numbers
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        seconds = time.monotonic() - began
        done = trainer.state.global_step - (0 if last is None else int(last.name.rpartition("-")[2]))
        return Trained(
            trainer.accelerator.unwrap_model(trainer.model),
            self._tokenizer,
            plan,
            _curve(trainer.state.log_history),
            seconds,
            done * effective / seconds,
            peak.mb(),
        )

    def _arguments(self, batch_size: int, accumulation: int) -> TrainingArguments:
        options = self._options
        out = Path(options.out)
        on_gpu = self._device.torch.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self._device.torch.index or 0)))
        by_epoch = bool(options.patience) or options.checkpoint_steps is None
        arguments = TrainingArguments(
            output_dir=str(out / CHECKPOINTS),
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=options.epochs,
            max_steps=options.max_steps or -1,
            learning_rate=options.learning_rate,
            max_grad_norm=1.0,
            bf16=self._precision is torch.bfloat16,
            fp16=self._precision is torch.float16,
            activation_checkpointing=options.gradient_checkpointing,
            dataloader_pin_memory=on_gpu,
            remove_unused_columns=False,
            label_names=["labels"],
            use_cpu=self._device.torch.type == "cpu",
            ddp_backend="gloo" if "WORLD_SIZE" in os.environ and not on_gpu else None,  # a single process needs none
            ddp_find_unused_parameters=False,
            seed=options.seed,
            logging_strategy="steps",
            report_to=[],
            disable_tqdm=True,
            eval_strategy="epoch" if options.patience else "no",
            load_best_model_at_end=bool(options.patience),
            metric_for_best_model="eval_loss" if options.patience else None,
            save_strategy="epoch" if by_epoch else "steps",
            save_steps=options.checkpoint_steps or 500,
            save_total_limit=MAX_CHECKPOINTS,
        )
        if arguments.world_size == 1:
            arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs in one process would share the interpreter lock
        return arguments

    def _optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Create AdamW: no weight decay for biases and norms, a higher learning rate for the head."""
        options = self._options
        decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # self is unused
        head = head_parameters(model)
        groups: dict[tuple[bool, bool], list[Any]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups.setdefault((name in head, name in decaying), []).append(parameter)
        return torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "lr": options.learning_rate * (HEAD_RATE if on_top else 1.0),
                    "weight_decay": WEIGHT_DECAY if decays else 0.0,
                }
                for (on_top, decays), parameters in groups.items()
            ],
            lr=options.learning_rate,
            fused=True,
        )

    def _callbacks(self, steps: int) -> list[TrainerCallback]:
        callbacks: list[TrainerCallback] = [_ProgressCallback(self._progress, steps)]
        if self._options.patience:
            callbacks.append(transformers.EarlyStoppingCallback(self._options.patience))
        return callbacks

    def _loss_of_step(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """Return the rows' share of the mean loss over all rows of the optimization step."""
        losses = self._loss(outputs["logits"].float(), labels)
        if num_items_in_batch is None:
            return losses.mean()
        # The Trainer counts label values; a distribution has one per label, not one per row.
        rows: torch.Tensor = num_items_in_batch / (labels.shape[1] if labels.dim() == 2 else 1)
        return losses.sum() / rows

    def _fit_head(self, model: Any, train: Sequence[dict[str, Any]]) -> None:
        some = random.Random(self._options.seed).sample(train, min(len(train), MAX_HEAD_EXAMPLES))
        by_length = sorted(some, key=lambda row: len(row["input_ids"]))
        batches = [self._collate([dict(row) for row in rows]) for rows in _batched(by_length, HEAD_BATCH_SIZE)]
        fit_head(model, batches, self._loss)

    def _last_checkpoint(self) -> Path | None:
        if not self._options.resume:
            return None
        folder = str(Path(self._options.out) / CHECKPOINTS)
        found = transformers.trainer_utils.get_last_checkpoint(folder)  # type: ignore[no-untyped-call]
        return None if found is None else Path(found)


def save(trained: Trained, folder: Path) -> None:
    """Save a plain transformers folder: safetensors, configuration with labels, tokenizer. Raises OSError."""
    trained.tokenizer.backend_tokenizer.no_truncation()  # do not save the settings used for training
    trained.tokenizer.backend_tokenizer.no_padding()
    trained.tokenizer.save_pretrained(folder)
    trained.model.to("cpu").save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)  # written as owner-only, but other users serve it
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def next_smaller_batch(batch_size: int, accumulation: int) -> tuple[int, int]:
    """Return the next smaller batch size and the accumulation that keeps their product."""
    effective = batch_size * accumulation
    size = next(size for size in range(batch_size - 1, 0, -1) if effective % size == 0)
    return size, effective // size


def _batched(rows: Sequence[RowT], size: int) -> list[Sequence[RowT]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _curve(history: Sequence[dict[str, Any]]) -> list[Point]:
    """Convert the Trainer's log to points."""
    return [
        Point(
            int(entry["step"]),
            float(entry["epoch"]),
            entry.get("loss"),
            entry.get("learning_rate"),
            entry.get("eval_loss"),
        )
        for entry in history
        if "loss" in entry or "eval_loss" in entry
    ]


class Order(Sampler[int]):
    """A reproducible order of examples, different in each epoch and determined by the seed.

    batch: examples per optimization step, over all devices. Examples of similar length are in one step, which is sorted
    by length, so that its forward passes need little padding. Steps come in random order, but the first epoch begins
    with the step of the longest example, so that running out of memory shows at once.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self._lengths, self._batch, self._seed = lengths, batch, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
        order: list[int] = torch.randperm(len(self._lengths), generator=generator).tolist()
        # An incomplete last step stays at the end: elsewhere it would shift the steps after it.
        complete = len(order) - len(order) % self._batch
        steps: list[list[int]] = []
        for start in range(0, complete, STEPS_SORTED_TOGETHER * self._batch):
            chunk = sorted(order[start : min(start + STEPS_SORTED_TOGETHER * self._batch, complete)], key=self._length)
            steps += [chunk[at : at + self._batch] for at in range(0, len(chunk), self._batch)]
        if self._epoch:
            steps = [steps[place] for place in torch.randperm(len(steps), generator=generator).tolist()]
        elif steps:
            steps.insert(0, steps.pop(max(range(len(steps)), key=lambda place: self._length(steps[place][-1]))))
            steps[1:] = [steps[1 + place] for place in torch.randperm(len(steps) - 1, generator=generator).tolist()]
        return iter([example for step in steps for example in step] + sorted(order[complete:], key=self._length))

    def _length(self, example: int) -> int:
        return self._lengths[example]


class _Trainer(Trainer):
    """A Trainer that uses our `Order`."""

    def __init__(self, order: Order, **arguments: Any) -> None:
        self._order = order
        super().__init__(**arguments)

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> Order:  # type: ignore[override]  # noqa: ARG002
        return self._order


class _ProgressCallback(TrainerCallback):
    """Report each optimization step."""

    def __init__(self, progress: Callable[[TrainingProgress], None], steps: int) -> None:
        self._progress, self._steps = progress, steps
        self._loss: float | None = None
        self._rate: float | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        self._loss = (logs or {}).get("loss", self._loss)
        self._rate = (logs or {}).get("learning_rate", self._rate)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            self._progress(TrainingProgress(state.global_step, self._steps, state.epoch or 0.0, self._loss, self._rate))


def load_tokenizer(weights: Weights, most: int, remote_code: bool = False) -> Any:
    """Load the base's tokenizer, set to truncate to `most` tokens or the base's lower limit. Raises ModelError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            weights.folder, local_files_only=True, trust_remote_code=remote_code
        )
    except Exception as error:  # a broken tokenizer can fail in any way
        raise ModelError(
            f"Cannot load the tokenizer in {weights.folder}: {clause(error)}. Download the model again, or "
            "use another base."
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    takes = max_row_tokens(read_config(weights, remote_code))
    # Saved with the model, so that workers truncate texts as training did.
    tokenizer.model_max_length = min(most, tokenizer.model_max_length, takes or most)
    return tokenizer


def make_model(weights: Weights, labels: Sequence[str], pad_id: int, remote_code: bool = False) -> Any:
    """Load the base in float32 with a head for these labels. A head of the same size in the base is kept.

    Raises ModelError.
    """
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the head is new on purpose
    if read_config_file(weights).get("model_type") == GLICLASS:
        raise ModelError(f"{weights.name} is a GLiClass model, which cannot be fine-tuned here. Use another base.")
    config = read_config(weights, remote_code)
    if config.model_type in PADDING_SENSITIVE_TYPES:
        raise ModelError(
            f"{weights.name} has the unsupported model type {config.model_type}: its scores depend on padding. "
            "Use another base."
        )
    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            weights.folder,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: place for place, label in enumerate(labels)},
            problem_type="single_label_classification",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=remote_code,
        )
    except Exception as error:  # a broken folder can fail in any way
        raise ModelError(
            f"Cannot load {weights.name} for classification: {clause(error)}. Download it again, or use another base."
        ) from error
    model.config.pad_token_id = padding_token(model.config, pad_id)
    return model


def head_parameters(model: Any) -> set[str]:
    """Return the names of the head's parameters: all that are not the base's."""
    base = f"{model.base_model_prefix}."
    return {name for name, _ in model.named_parameters() if not name.startswith(base)}


@torch.no_grad()
def fit_head(model: Any, batches: Sequence[dict[str, Any]], loss_of: Callable[[Any, Any], torch.Tensor]) -> None:
    """Fit the last linear layer to the features of these batches. loss_of: maps logits and labels to a loss per row.

    Leaves the model unchanged if its last layer does not return logits of [rows, labels].
    """
    last = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][-1]
    if last.out_features != model.config.num_labels:
        return
    seen: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    model.eval()
    try:
        for batch in batches:
            labels.append(batch["labels"].to(model.device))
            model(**{name: value.to(model.device) for name, value in batch.items() if name != "labels"})
    finally:
        hook.remove()
    # In float64, the fit converges to the same result despite rounding; the computation is small.
    features, wanted = torch.cat(seen).cpu().double(), torch.cat(labels).cpu()
    if features.shape[:-1] != wanted.shape[:1]:
        return
    # Unit variance, so that RIDGE_PENALTY has the same effect for every base.
    scale = features.std().clamp_min(1e-6)
    weight, bias = fit_logistic(features / scale, wanted, last.out_features, loss_of, RIDGE_PENALTY)
    last.weight.copy_(weight / scale)
    if last.bias is not None:
        last.bias.copy_(bias)
