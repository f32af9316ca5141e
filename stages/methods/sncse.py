"""SNCSE: SimCSE, and a sentence's negation kept nearer than other sentences but farther than its positive."""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from cluster.errors import InputError
from cluster.world import World
from stages.encoder import Encoder, padded
from stages.methods.base import MLP, Batch, Method, MethodSettings, Metrics, full_precision, own_rows
from stages.methods.functional import bidirectional_margins, info_nce
from stages.methods.negation import negate

Margin = Annotated[float, Field(ge=0, le=2)]                   # a difference of cosines


class SNCSEConfig(MethodSettings):
    """SNCSE, arXiv:2201.05979, with the encoder's pooling in place of the paper's prompts and their [MASK] vectors."""

    name: Literal["sncse"]
    temperature: PositiveFloat = 0.05
    least_margin: Margin = 0.1                                 # alpha: the negation's cosine is lower by at least this
    greatest_margin: Margin = 0.3                              # beta: and by no more than this
    margin_weight: NonNegativeFloat = 1e-3                     # lambda
    mlp: MLP = "train-only"

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse margins between which there is nothing.

        Raises:
            InputError: with the settings to change.
        """
        if self.least_margin > self.greatest_margin:
            raise InputError(
                f"train.method.least_margin={self.least_margin} is more than train.method.greatest_margin="
                f"{self.greatest_margin}; lower the one or raise the other"
            )

    def build(self, encoder: Encoder) -> "SNCSE":
        """The module to train."""
        return SNCSE(encoder, self)


class SNCSE(Method):
    """SimCSE's loss plus lambda times the bidirectional margin loss.

    The paper makes negations with a dependency parser; here :func:`negate` does, by rules. A sentence that no rule
    fits has no soft negative: the margin loss is a mean over the others.
    """

    def __init__(self, encoder: Encoder, config: SNCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config

    def augment(self, batch: Batch, seeds: NDArray[np.uint64], tokenizer: PreTrainedTokenizerFast) -> Batch:
        """The n sentences and, below, their n negations; a sentence without one stands there as itself."""
        sentences = [ids[mask.bool()] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
        texts = tokenizer.batch_decode(sentences, skip_special_tokens=True)
        rows = sentences + [
            sentence if negated is None else self._tokens(negated, tokenizer)
            for sentence, negated in zip(sentences, map(negate, texts), strict=True)
        ]
        input_ids, mask = padded(rows, int(tokenizer.pad_token_id))
        return replace(batch, input_ids=input_ids, attention_mask=mask)

    def _tokens(self, text: str, tokenizer: PreTrainedTokenizerFast) -> Tensor:
        return torch.tensor(tokenizer(text, truncation=True, max_length=self.encoder.config.max_length)["input_ids"])

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode two views and what negations there are in one pass, then leave autocast for the loss."""
        sentences, others = batch.input_ids.chunk(2)
        mask, other_mask = batch.attention_mask.chunk(2)
        negated = (sentences != others).any(dim=1)
        embeddings = self.encoder(
            torch.cat([sentences, sentences, others[negated]]), torch.cat([mask, mask, other_mask[negated]])
        ).embedding
        with full_precision(embeddings.device):
            units = F.normalize(self.head(embeddings), dim=-1)
            anchors, positives, negatives = units.tensor_split((len(sentences), 2 * len(sentences)))
            return self.loss(anchors, positives, negatives, negated, world)

    def loss(
        self, anchors: Tensor, positives: Tensor, negatives: Tensor, negated: Tensor, world: World
    ) -> tuple[Tensor, Metrics]:
        """Of this worker's (n, D) unit vectors; ``negatives`` are of those rows alone that (n,) ``negated`` names."""
        config = self.config
        targets = own_rows(world, len(anchors), anchors.device)
        contrast = info_nce(anchors, world.gather(positives), targets, config.temperature)
        margins = bidirectional_margins(
            anchors[negated], positives[negated], negatives, config.least_margin, config.greatest_margin
        )
        share = negated.float().mean()
        negations = world.mean(negated.float().sum()).clamp(min=1 / world.size)    # of a worker on average, so that
        margin = margins.sum() / negations                                         # the mean over workers is global
        loss = contrast + config.margin_weight * margin
        metrics = {
            "loss": loss,
            "loss_contrast": contrast,
            "loss_margin": margin,
            "positive_cosine": (anchors * positives).sum(dim=-1).mean(),
            "soft_negatives": share,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
