"""What every training method is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from cluster.world import World
from stages.encoder import Encoder, EncoderConfig, Encoding, Layers, MLPHead


@dataclass(frozen=True)
class Batch:
    """One worker's contiguous share of a global batch: n rows of k sentences, k being 1 without labelled data.

    First come the first sentences of all rows, then the second ones, and so on.
    """

    input_ids: Tensor                                          # (k * n, S) int64
    attention_mask: Tensor                                     # (k * n, S) int64
    labels: Tensor | None = None                               # (n,) float32 in [0, 1], of pairs
    text_ids: Tensor | None = None                             # (k * n,) int64, equal for equal sentences
    hidden: Tensor | None = None                               # (k * n, S) int64, what tokens a method has masked or
                                                               # replaced; -100 elsewhere
    noise: Tensor | None = None                                # (k * n, S) float32 in [0, 1), what decides a draw that
                                                               # a method makes for each token on the device
    done: float = 0.0                                          # part of all steps that lie before this one


MLP = Literal["none", "train-only"]
"""SimCSE's head: none, or one that is dropped at test."""

Metrics = dict[str, Tensor]
"""Scalars of one step, without gradients, each a mean over this worker's sentences."""


class MethodSettings(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """What the configs of all methods share."""

    version: ClassVar[int] = 1                                 # raise it when the code gives another result
    needs_whole_weights: ClassVar[bool] = False                # on every worker, which ZeRO-3 does not leave there
    needs_whole_batches: ClassVar[bool] = False                # in each pass of the encoder

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse what cannot be meant; any encoder and batch will do, unless a method says otherwise.

        Args:
            depth: layers T of the encoder.
            batch_size: rows in the global batch.

        Raises:
            InputError: with the one setting to change.
        """

    def check_encoder(self, encoder: EncoderConfig) -> None:
        """Refuse an encoder that the method cannot train; any will do, unless a method says otherwise.

        Raises:
            InputError: with the setting to change.
        """

    @property
    def reads_encoders(self) -> tuple[str, ...]:
        """Names or folders of other encoders that the method needs, such as teachers."""
        return ()

    def located(self, absolute: Callable[[str], str]) -> Self:
        """The settings with ``absolute`` applied to all of ``reads_encoders``, for workers in folders of their own."""
        return self


class Method(nn.Module):
    """An encoder under training: a batch in, the loss of this worker's anchors out.

    The mean of the losses over workers is the loss of the global batch, and so are its gradients.
    """

    def __init__(self, encoder: Encoder, mlp: MLP = "none") -> None:
        super().__init__()
        self.encoder = encoder
        self.mlp = MLPHead(encoder.dimension) if mlp == "train-only" else None

    def head(self, embedding: Tensor) -> Tensor:
        """(B, D) what the loss compares: the embeddings, through SimCSE's head if the method has it."""
        return embedding if self.mlp is None else self.mlp(embedding)

    def augment(self, batch: Batch, seeds: NDArray[np.uint64], tokenizer: PreTrainedTokenizerFast) -> Batch:
        """The batch with what the method changes in its tokens, on the CPU; here nothing.

        Args:
            batch: n rows.
            seeds: (n,) of all that is drawn for each row, which follow from the run's seed, the step and the row's
                place in the global batch, so that any number of workers draws the same.
            tokenizer: of the encoder.
        """
        return batch

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """() loss with gradients, and what to log."""
        raise NotImplementedError

    def resume_state(self) -> dict[str, Tensor]:
        """What must be kept, beside weights, to go on as if never stopped."""
        return {}

    def load_resume_state(self, state: dict[str, Tensor]) -> None:
        """Take up ``resume_state()``."""


class Beside:
    """A module that a method uses and no engine trains, shards or saves; it follows the encoder's device."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.requires_grad_(False).eval()

    def on(self, device: torch.device) -> nn.Module:
        """The module there."""
        return self.module.to(device)


class TwoViewMethod(Method):
    """A method whose loss needs two dropout views of each sentence, if need be through SimCSE's head."""

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode both views in one pass, then leave autocast for the loss."""
        first, second = two_views(self.encoder, batch)
        with full_precision(first.embedding.device):
            return self.loss(first, second, world)

    def loss(self, first: Encoding, second: Encoding, world: World) -> tuple[Tensor, Metrics]:
        """() loss of this worker's anchors against the global batch, and what to log."""
        raise NotImplementedError


def two_views(encoder: Encoder, batch: Batch) -> tuple[Encoding, Encoding]:
    """Encode every sentence twice in one forward pass of 2n sequences; dropout makes the views differ."""
    both = encoder(batch.input_ids.repeat(2, 1), batch.attention_mask.repeat(2, 1))
    n = len(batch.input_ids)
    return tuple(  # type: ignore[return-value]
        Encoding(both.embedding[part], Layers(both.layers.cls[:, part], both.layers.mean[:, part]))
        for part in (slice(0, n), slice(n, 2 * n))
    )


def full_precision(device: torch.device) -> torch.autocast:
    """Leave autocast: cosines divided by a temperature of 0.05 need more digits than bf16 has."""
    return torch.autocast(device.type, enabled=False)


def own_rows(world: World, n: int, device: torch.device) -> Tensor:
    """(n,) int64, where this worker's n rows lie in a gathered tensor."""
    return world.rank * n + torch.arange(n, device=device)
