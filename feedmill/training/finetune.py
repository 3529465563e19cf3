"""Fine-tune a sequence classifier with transformers' Trainer: examples and options in, weights out.

Differences from the plain Trainer:

- the new head is fitted to the base's features first. A random one sends large, undirected gradients into the base,
  which distorts its features ("Fine-Tuning can Distort Pretrained Features", arXiv 2202.10054);
- seed and epoch alone decide the order of examples (`Order`); the Trainer's grouping by length draws from the global
  generator. Resumed and accumulated runs therefore see the same batches;
- the loss is a sum divided by the examples of the whole optimization step, so gradient accumulation is exact.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
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
from feedmill.shared.errors import UserError
from feedmill.shared.settings import Settings
from feedmill.training.data import CHECKPOINTS, Dataset, TrainOptions
from feedmill.training.head import fit_logistic, loss_of_rows
from feedmill.workers.models import device
from feedmill.workers.models.classifiers.registry import check_size
from feedmill.workers.models.engines import device_errors
from feedmill.workers.models.engines.network import load_pretrained, max_row_tokens, padding_token, read_config
from feedmill.workers.models.tokenizer import load_tokenizer
from feedmill.workers.models.weights import Weights, locate
from feedmill.workers.pipeline.calibration import Peak

#: Rows per forward pass when fitting the head. Fixed, so that the head does not depend on the batch size.
HEAD_BATCH_SIZE = 16
#: Maximum examples for fitting the head: enough for its few thousand weights.
MAX_HEAD_EXAMPLES = 20_000
#: Approximate number of points on the loss curve.
CURVE_POINTS = 60
#: Share of the steps with a rising learning rate; it then falls to 0 linearly.
WARMUP = 0.1
WEIGHT_DECAY = 0.01
#: L2 penalty of the fitted head. With the embedded model and 830 real posts, values from 0.02 to 0.2 differ little;
#: below 0.01 the head overfits.
RIDGE_PENALTY = 0.05
#: Optimization steps whose examples are sorted by length together. More steps reduce padding; fewer add randomness.
STEPS_SORTED_TOGETHER = 32


class Trained(NamedTuple):
    """Result of a training run."""

    model: Any
    tokenizer: Any
    #: The training's part of training.json: plan, seconds, samples_per_s, peak_mb (10^6 bytes; None if unknown) and
    #: curve, the Trainer's log of losses.
    record: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Save a plain transformers folder: safetensors, configuration with labels, tokenizer. Raises OSError."""
        self.tokenizer.backend_tokenizer.no_truncation()  # do not save the settings used for training
        self.tokenizer.backend_tokenizer.no_padding()
        self.tokenizer.save_pretrained(folder)
        self.model.to("cpu").save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):
            weights.chmod((folder / "config.json").stat().st_mode)  # written as owner-only, but other users serve it


class Training:
    """One training run. Raises UserError if it cannot start."""

    def __init__(self, dataset: Dataset, options: TrainOptions, settings: Settings, report: Report) -> None:
        self._dataset, self._options = dataset, options
        self._report = report
        self._device = device.select_device(settings.device, "float32")
        self._precision, self._why_precision = device.for_training(self._device, settings.dtype)
        self._weights = locate(options.base, settings.revision, settings.trust_remote_code)
        check_size(self._weights, self._device)
        self._tokenizer = _tokenizer(self._weights, options.max_tokens)
        self._collate = DataCollatorWithPadding(
            self._tokenizer, pad_to_multiple_of=8 if self._device.torch.type == "cuda" else None
        )

    @device_errors()
    def run(self) -> Trained:
        """Train the model. Raises UserError, DeviceFull or DeviceLost."""
        seed, data = self._options.seed, self._dataset
        self._report.phase(f"tokenizing {len(data.train):,} posts")
        train = self._rows(data.train)
        transformers.set_seed(seed)
        self._report.phase(f"loading {self._weights.name}")
        model = make_model(self._weights, data.labels, self._tokenizer.pad_token_id)
        arguments = self._arguments()
        model.to(arguments.device)
        last = self._last_checkpoint()
        if last is None:
            self._report.phase("fitting the head")
            self._fit_head(model, train)
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=train,
            data_collator=self._collate,
            compute_loss_func=self._loss_of_step,
            callbacks=[_Progress(self._report)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        peak, plan = Peak(self._device.torch, "torch"), self._plan()
        self._report.phase("training", plan["steps"])
        transformers.set_seed(seed)  # fitting the head may have drawn random numbers
        seconds = trainer.train(resume_from_checkpoint=last).metrics["train_runtime"]
        steps = trainer.state.global_step - (0 if last is None else int(last.rpartition("-")[2]))
        record = {
            "plan": plan,
            "seconds": seconds,
            "samples_per_s": steps * plan["effective_batch"] / seconds,  # without tokenizing and fitting the head
            "peak_mb": peak.mb(),
            "curve": [entry for entry in trainer.state.log_history if "loss" in entry],
        }
        return Trained(trainer.accelerator.unwrap_model(trainer.model), self._tokenizer, record)

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
        steps = math.ceil(options.epochs * math.ceil(len(self._dataset.train) / batch))
        precision = f"{str(self._precision).removeprefix('torch.')}: {self._why_precision}"
        self._report.print(
            f"Effective batch {batch} = {options.batch_size} × {options.accumulation} accumulated; "
            f"{steps:,} optimization steps, {options.epochs:.3g} epochs; {self._device.name} in {precision}"
        )
        return {"precision": precision, "device": self._device.name, "effective_batch": batch, "steps": steps}

    def _rows(self, examples: Sequence[Labelled]) -> list[dict[str, Any]]:
        columns = dict(self._tokenizer([example.post.text for example in examples], truncation=True))
        columns["labels"] = self._dataset.targets(examples, self._options)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _arguments(self) -> TrainingArguments:
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
            save_strategy="epoch",
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

    @torch.no_grad()
    def _fit_head(self, model: Any, train: Sequence[dict[str, Any]]) -> None:
        """Fit the last linear layer to its inputs for the training rows.

        Leaves the model unchanged if its last layer does not return logits of [rows, labels].
        """
        last = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)][-1]
        if last.out_features != model.config.num_labels:
            return
        some = random.Random(self._options.seed).sample(train, min(len(train), MAX_HEAD_EXAMPLES))
        some.sort(key=lambda row: len(row["input_ids"]))
        inputs: list[torch.Tensor] = []
        hook = last.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
        model.eval()
        for start in range(0, len(some), HEAD_BATCH_SIZE):
            batch = self._collate([dict(row) for row in some[start : start + HEAD_BATCH_SIZE]])
            model(**{name: value.to(model.device) for name, value in batch.items() if name != "labels"})
        hook.remove()
        # In float64, the fit converges to the same result despite rounding; the computation is small.
        features, wanted = torch.cat(inputs).cpu().double(), torch.tensor([row["labels"] for row in some])
        if features.shape[:-1] != wanted.shape[:1]:
            return
        # Unit variance, so that RIDGE_PENALTY has the same effect for every base.
        scale = features.std().clamp_min(1e-6)
        ((weight, bias),) = fit_logistic(features / scale, wanted, [RIDGE_PENALTY], bias_penalty=0.0)
        last.weight.copy_(weight / scale)
        if last.bias is not None:
            last.bias.copy_(bias)


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
