"""ESimCSE: positives with repeated words, and negatives of earlier batches from a momentum encoder."""

import copy
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cluster.errors import InputError
from cluster.queue import Queue
from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import MLP, Batch, Beside, Method, MethodSettings, Metrics, full_precision, own_rows
from stages.methods.functional import info_nce
from stages.methods.repetition import draw_places, left_out, repeat, sentences, with_second

PREFIX = "momentum."                                           # of the momentum encoder's weights in a checkpoint


class ESimCSEConfig(MethodSettings):
    """ESimCSE, arXiv:2109.04380, with the values of its BERT-base."""

    needs_whole_weights: ClassVar[bool] = True                 # the momentum encoder follows them

    name: Literal["esimcse"]
    temperature: PositiveFloat = 0.05
    repetition: NonNegativeFloat | None = 0.32                 # dup_rate: at most this part of the tokens comes twice;
                                                               # null: positives differ by dropout alone
    queue_length: NonNegativeInt = 160                         # 2.5 batches of 64; 0: no momentum contrast
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.995      # gamma: what the momentum encoder keeps at each step
    mlp: MLP = "train-only"                                    # SimCSE's head

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse a queue that cannot take a whole batch.

        Raises:
            InputError: with the setting to change.
        """
        if 0 < self.queue_length < batch_size:
            raise InputError(
                f"train.method.queue_length={self.queue_length} is shorter than train.batch_size={batch_size}, of "
                f"which every sentence is pushed at each step; use at least {batch_size}, or 0 for no queue"
            )

    def build(self, encoder: Encoder) -> "ESimCSE":
        """The module to train."""
        return ESimCSE(encoder, self)


class ESimCSE(Method):
    """Equation 6: SimCSE's loss with the queue among the candidates."""

    def __init__(self, encoder: Encoder, config: ESimCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config
        self.queue = Queue(config.queue_length, encoder.dimension)
        self.momentum = Beside(copy.deepcopy(encoder)) if config.queue_length > 0 else None

    def augment(self, batch: Batch, seeds: NDArray[np.uint64], tokenizer: PreTrainedTokenizerFast) -> Batch:
        """The sentences and, after them, the same with repeated tokens."""
        rate = self.config.repetition
        if rate is None:
            return with_second(batch, list(sentences(batch)), tokenizer.pad_token_id)
        left, repeated = left_out(tokenizer), []
        for sentence, seed in zip(sentences(batch), seeds, strict=True):
            room = self.encoder.positions - len(sentence)
            places = draw_places(np.random.default_rng(int(seed)), sentence, left, rate, room, stop_words=True)
            repeated.append(repeat(sentence, places)[0])
        return with_second(batch, repeated, tokenizer.pad_token_id)

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """The loss against the queue as it stands; then the momentum encoder's embeddings of this batch join it."""
        embeddings = self.encoder(batch.input_ids, batch.attention_mask).embedding
        with full_precision(embeddings.device):
            anchors, positives = F.normalize(self.head(embeddings), dim=-1).chunk(2)
            loss, metrics = self._loss(anchors, positives, world)
        if self.momentum is not None:
            ids, mask = batch.input_ids.chunk(2)[0], batch.attention_mask.chunk(2)[0]
            self._remember(self.momentum, ids, mask, world)
        return loss, metrics

    def _loss(self, anchors: Tensor, positives: Tensor, world: World) -> tuple[Tensor, Metrics]:
        """Cross-entropy of this worker's (n, D) anchors against all workers' positives and the queue."""
        queue = self.queue.rows.to(anchors.device)
        targets = own_rows(world, len(anchors), anchors.device)
        loss = info_nce(anchors, torch.cat([world.gather(positives), queue]), targets, self.config.temperature)
        metrics = {"loss": loss, "positive_cosine": (anchors * positives).sum(dim=-1).mean()}
        if self.momentum is not None:
            metrics["queue_fill"] = anchors.new_tensor(len(queue) / self.queue.length)
        return loss, {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def _remember(self, momentum: Beside, ids: Tensor, mask: Tensor, world: World) -> None:
        """Let the momentum encoder follow, and push what it makes of all workers' sentences, without dropout.

        It follows the weights that this step's loss was computed with, since the step itself comes after. It has no
        head of its own: its embeddings pass the head that is trained, as in the authors' code.
        """
        follower = momentum.on(ids.device)
        for kept, weight in zip(follower.parameters(), self.encoder.parameters(), strict=True):
            kept.lerp_(weight.to(kept.dtype), 1 - self.config.momentum)
        embeddings = follower(ids, mask).embedding
        with full_precision(ids.device):
            self.queue.push(world.gather(F.normalize(self.head(embeddings), dim=-1)))

    def resume_state(self) -> dict[str, Tensor]:
        """The queue and the momentum encoder."""
        if self.momentum is None:
            return {}
        weights = self.momentum.module.state_dict()
        return self.queue.state() | {PREFIX + name: value.to("cpu", copy=True) for name, value in weights.items()}

    def load_resume_state(self, state: dict[str, Tensor]) -> None:
        """Take up both."""
        if self.momentum is not None:
            weights = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
            self.momentum.module.load_state_dict(weights)
            self.queue.load_state(state)
