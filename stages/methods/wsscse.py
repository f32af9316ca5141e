"""WSSCSE: beside two dropout views, a weak sample of the sentence, made by repetition and a masked language model."""

from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import MLP, Batch, Method, MethodSettings, Metrics, full_precision, own_rows
from stages.methods.functional import info_nce, masked_token_loss
from stages.methods.generator import Choice, Generator
from stages.methods.repetition import draw_places, left_out, repeat, sentences, with_second


class WSSCSEConfig(MethodSettings):
    """WSSCSE, and its ablations.

    ``weak_weight`` and ``masked`` both 0: no augmentation, which is SimCSE. ``masked`` alone 0: the weak sample is the
    sentence with repetitions, and there is no generator. ``weak_weight`` alone 0: l_MLM beside SimCSE's loss.
    """

    name: Literal["wsscse"]
    temperature: PositiveFloat = 0.05
    weak_weight: NonNegativeFloat = 0.1                        # lambda
    repetition: NonNegativeFloat = 0.24                        # r: at most this part of the tokens comes twice
    masked: Annotated[float, Field(ge=0, le=1)] = 0.85         # of the repeated tokens; the others stay as they are
    generator: Literal["shared", "own"] = "shared"             # shared: a head upon the encoder; own: a second model
    fill: Choice = "argmax"                                    # how the generator's tokens are chosen
    mlp: MLP = "train-only"                                    # SimCSE's head

    def build(self, encoder: Encoder) -> "WSSCSE":
        """The module to train."""
        return WSSCSE(encoder, self)


class WSSCSE(Method):
    """l = l_CON + lambda l_WSS + l_MLM."""

    def __init__(self, encoder: Encoder, config: WSSCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config
        self.generator = Generator.load(encoder, config.generator == "own") if config.masked > 0 else None
        self.augments = config.weak_weight > 0 or config.masked > 0

    def augment(self, batch: Batch, seeds: NDArray[np.uint64], tokenizer: PreTrainedTokenizerFast) -> Batch:
        """The sentences and, after them, the same with repeated tokens, most of these masked."""
        if not self.augments:
            return batch
        left, repeated, hidden = left_out(tokenizer), [], []
        for sentence, seed in zip(sentences(batch), seeds, strict=True):
            random = np.random.default_rng(int(seed))
            room = self.encoder.positions - len(sentence)
            places = draw_places(random, sentence, left, self.config.repetition, room, stop_words=False)
            tokens, copies = repeat(sentence, places)
            masked = copies[random.random(len(copies)) < self.config.masked]
            hidden.append(np.full(len(tokens), -100))
            hidden[-1][masked] = tokens[masked]
            tokens[masked] = tokenizer.mask_token_id
            repeated.append(tokens)
        return with_second(batch, repeated, tokenizer.pad_token_id, hidden)

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Fill the masks, encode two views and the weak sample in one pass, then leave autocast for the loss."""
        members = 2 if self.augments else 1
        n = len(batch.input_ids) // members
        ids, mask = batch.input_ids[:n], batch.attention_mask[:n]
        weak, weak_mask = batch.input_ids[n:], batch.attention_mask[n:]
        masked_lm = torch.zeros((), device=ids.device)
        metrics: Metrics = {}
        if self.generator is not None:
            assert batch.hidden is not None
            weak, masked_lm, metrics = self._fill(self.generator, weak, weak_mask, batch.hidden[n:], world)
        views = [ids, ids, weak] if self.config.weak_weight > 0 else [ids, ids]
        masks = [mask, mask, weak_mask][: len(views)]
        embeddings = self.encoder(torch.cat(views), torch.cat(masks)).embedding
        with full_precision(embeddings.device):
            compared = self.head(embeddings)
            contrast, parts = self._contrast(F.normalize(compared, dim=-1).chunk(len(views)), world)
            loss = contrast + masked_lm
        return loss, {"loss": loss.detach()} | parts | metrics

    def _fill(
        self, generator: Generator, ids: Tensor, mask: Tensor, hidden: Tensor, world: World
    ) -> tuple[Tensor, Tensor, Metrics]:
        """(n, S) tokens with the generator's in the masks' place, l_MLM over all workers' masks, and what to log."""
        places = hidden != -100
        logits = generator(self.encoder, ids, mask, places)
        with full_precision(logits.device):
            # A worker may have more masks than another: the mean is over those of the global batch.
            count = world.mean(places.sum().float()).clamp(min=1 / world.size)
            loss = masked_token_loss(logits.float(), hidden[places], count)
        chosen = generator.choose(logits, self.config.fill)
        accuracy = (chosen == hidden[places]).sum() / count
        return ids.masked_scatter(places, chosen), loss, {"loss_mlm": loss.detach(), "mlm_accuracy": accuracy}

    def _contrast(self, units: tuple[Tensor, ...], world: World) -> tuple[Tensor, Metrics]:
        """l_CON + lambda l_WSS of this worker's anchors; ``units``: both views and, if it counts, the weak sample."""
        anchors, positives, *weak = units
        targets = own_rows(world, len(anchors), anchors.device)
        loss = info_nce(anchors, world.gather(positives), targets, self.config.temperature)
        metrics = {"loss_instance": loss.detach(), "positive_cosine": (anchors * positives).sum(dim=-1).mean().detach()}
        for samples in weak:
            part = info_nce(anchors, world.gather(samples), targets, self.config.temperature)
            loss = loss + self.config.weak_weight * part
            metrics |= {"loss_weak": part.detach(), "weak_cosine": (anchors * samples).sum(dim=-1).mean().detach()}
        return loss, metrics
