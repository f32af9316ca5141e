"""SG-OPT: the layers of the encoder as it was given guide its [CLS] vector."""

import copy
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from cluster.world import World
from stages.encoder import Encoder, masked_mean
from stages.methods.base import Batch, Beside, Method, MethodSettings, Metrics, full_precision, own_rows
from stages.methods.functional import self_guided_loss

PROJECTION = 4096                                              # numbers that the paper's projection head puts out


class SGOPTConfig(MethodSettings):
    """SG-OPT, arXiv:2106.07345; ``encoder.pooling`` of cls is the paper's."""

    needs_whole_weights: ClassVar[bool] = True                 # to hold them against those at the start

    name: Literal["sg-opt"]
    temperature: PositiveFloat = 0.01
    guides: Literal["mean", "max"] = "mean"                    # how the tokens of a fixed layer become one vector
    drift_weight: NonNegativeFloat = 0.1                       # lambda, of the squared distance from the first weights

    def build(self, encoder: Encoder) -> "SGOPT":
        """The module to train."""
        return SGOPT(encoder, self)


class SGOPT(Method):
    """L^opt3 plus lambda times the squared distance of the encoder's weights from those that it began with.

    Guides are all layers of a fixed copy of the encoder, that of the embeddings included. The embedding layer is not
    trained, as in the authors' code. The projection head is dropped at test.
    """

    def __init__(self, encoder: Encoder, config: SGOPTConfig) -> None:
        super().__init__(encoder)
        self.config = config
        self.fixed = Beside(copy.deepcopy(encoder).backbone)
        for parameter in encoder.backbone.embeddings.parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(False)
        self.projector = ProjectionHead(encoder.dimension, PROJECTION)

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode with the encoder and with its fixed copy, then leave autocast for the loss."""
        embeddings = self.encoder(batch.input_ids, batch.attention_mask).embedding
        guides = self.guides(batch)                            # (n, T+1, d)
        both = self.projector(torch.cat([embeddings[:, None], guides], dim=1))
        with full_precision(embeddings.device):
            units = F.normalize(both, dim=-1)
            return self.loss(units[:, 0], units[:, 1:], world)

    @torch.no_grad()
    def guides(self, batch: Batch) -> Tensor:
        """(n, T+1, d) the fixed encoder's vectors of all layers."""
        fixed, mask = self.fixed.on(batch.input_ids.device), batch.attention_mask
        states = fixed(input_ids=batch.input_ids, attention_mask=mask, output_hidden_states=True).hidden_states
        if self.config.guides == "mean":
            return torch.stack([masked_mean(layer, mask) for layer in states], dim=1)
        padding = ~mask.bool()[:, :, None]
        return torch.stack([layer.masked_fill(padding, -torch.inf).amax(dim=1) for layer in states], dim=1)

    def loss(self, anchors: Tensor, layers: Tensor, world: World) -> tuple[Tensor, Metrics]:
        """Of this worker's (n, D) unit anchors and (n, T+1, D) unit layers."""
        targets = own_rows(world, len(anchors), anchors.device)
        contrast = self_guided_loss(anchors, world.gather(layers), targets, self.config.temperature)
        drift = self.drift()
        loss = contrast + self.config.drift_weight * drift
        metrics = {
            "loss": loss,
            "loss_contrast": contrast,
            "drift": drift,
            "positive_cosine": (anchors[:, None] * layers).sum(dim=-1).mean(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def drift(self) -> Tensor:
        """() the squared distance of the backbone's weights from those of the fixed copy."""
        backbone = self.encoder.backbone
        fixed = self.fixed.on(next(backbone.parameters()).device)
        pairs = zip(backbone.parameters(), fixed.parameters(), strict=True)
        return torch.stack([
            (now.float() - first.to(now.dtype).float()).square().sum() for now, first in pairs if now.requires_grad
        ]).sum()                                               # first in the engine's precision: rounding is no drift


class ProjectionHead(nn.Module):
    """Dense, GELU, dense, GELU."""

    def __init__(self, dimension: int, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(dimension, size)
        self.second = nn.Linear(size, size)
        for layer in (self.first, self.second):
            nn.init.normal_(layer.weight, std=0.02)            # BERT's own start
            nn.init.zeros_(layer.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """(..., d) -> (..., size) float32."""
        projected = F.gelu(self.second(F.gelu(self.first(vectors.to(self.first.weight.dtype)))))
        return projected.float()
