"""The torch engine: a transformers model, loaded once, run on padded batches of token rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModel, AutoTokenizer

from shared.errors import DeviceLost, ModelError
from workers.device import Device
from workers.weights import Weights


class TorchEngine:
    """A model on its device. `architecture` is the transformers class that says what its outputs are.

    Raises ModelError when the folder does not hold such a model.
    """

    def __init__(self, weights: Weights, device: Device, architecture: type[Any] = AutoModel) -> None:
        self.device = device
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            self.model = architecture.from_pretrained(
                weights.folder,
                dtype=device.dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(weights.folder, local_files_only=True)
            #: The Rust tokenizer itself: it releases the GIL, which the Python one around it does not.
            self.tokenizer = tokenizer.backend_tokenizer
            self.max_tokens: int = self.model.config.max_position_embeddings
        except Exception as error:  # a broken folder fails in as many ways as it has files
            raise ModelError(f"The model in {weights.folder} cannot be loaded by transformers: {error}") from error
        self.model.to(device.torch).eval()
        # A tokenizer.json may pad every row to one length; rows here keep their own.
        self.tokenizer.no_padding()
        self._pad_id = tokenizer.pad_token_id or 0

    @torch.inference_mode()
    def forward(self, rows: Sequence[Sequence[int]]) -> tuple[Any, torch.Tensor]:
        """Run one micro-batch.

        rows: token ids of each row. Returns the model's output and the mask [rows, longest] of real tokens,
        both on the device. Raises DeviceLost.
        """
        longest = max(map(len, rows))
        ids = np.full((len(rows), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        input_ids = torch.from_numpy(ids).to(self.device.torch)
        attention_mask = torch.from_numpy(mask).to(self.device.torch)
        # Attention with a mask is slower than without one: a batch without padding needs none.
        padded = bool(mask.size != mask.sum())
        try:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask if padded else None)
        except torch.AcceleratorError as error:
            # Not out of memory, which is another class: after this every further call fails as well.
            raise DeviceLost(str(error)) from error
        return output, attention_mask
