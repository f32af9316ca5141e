"""DiffCSE: SimCSE, and embeddings from which a discriminator can tell which tokens of a sentence were replaced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerFast

from cluster.errors import InputError
from cluster.world import World
from stages.encoder import Encoder, resolve
from stages.methods.base import Batch, Beside, Method, MethodSettings, Metrics, full_precision, own_rows
from stages.methods.functional import info_nce, replaced_token_losses
from stages.methods.generator import Choice, load_masked_lm


class DiffCSEConfig(MethodSettings):
    """DiffCSE, arXiv:2204.10298."""

    name: Literal["diffcse"]
    temperature: PositiveFloat = 0.05
    generator: str | None = None                               # masked LM, hub name or folder, of the encoder's
                                                               # vocabulary; null: the encoder's own checkpoint
    masked: Annotated[float, Field(gt=0, lt=1)] = 0.3          # chance of a token to be masked and filled in
    fill: Choice = "sampled"                                   # which of the generator's tokens
    replaced_weight: NonNegativeFloat = 0.005                  # lambda, of the discriminator's loss

    @property
    def reads_encoders(self) -> tuple[str, ...]:
        """The generator, if it is named."""
        return () if self.generator is None else (self.generator,)

    def located(self, absolute: Callable[[str], str]) -> Self:
        """With the generator's folder made absolute."""
        return self.model_copy(update={"generator": None if self.generator is None else absolute(self.generator)})

    def check(self, depth: int, batch_size: int) -> None:
        """Refuse a named generator that is not there.

        Raises:
            InputError: with the setting to change.
        """
        if self.generator is not None:
            try:
                AutoConfig.from_pretrained(resolve(self.generator))
            except (OSError, ValueError) as error:
                raise InputError(
                    f"train.method.generator={self.generator!r} is no folder with a config.json and no model that the "
                    "hub gives here; name a masked language model, or leave it out for the encoder's own"
                ) from error

    def build(self, encoder: Encoder) -> "DiffCSE":
        """The module to train."""
        return DiffCSE(encoder, self)


class DiffCSE(Method):
    """SimCSE's loss plus lambda times the loss of replaced-token detection, as the paper's authors train it.

    Both views condition a detection of their own, with masks of their own. Embeddings go through the paper's
    projector with batch normalisation, which is dropped at test; the discriminator is dropped, too. What differs from
    the authors' code: every masked token is [MASK] to the generator, unmasked tokens are never replaced, and padding
    has no loss.
    """

    def __init__(self, encoder: Encoder, config: DiffCSEConfig) -> None:
        super().__init__(encoder)
        self.config = config
        self.projector = BatchNormHead(encoder.dimension)
        self.discriminator = Discriminator(encoder)
        self.generator = Beside(load_generator(config.generator or encoder.config.name, encoder))

    def augment(self, batch: Batch, seeds: NDArray[np.uint64], tokenizer: PreTrainedTokenizerFast) -> Batch:
        """The n sentences and, below, all of them twice with tokens masked; also what decides each token's filling."""
        n, width = batch.input_ids.shape
        masking, noise = np.ones((2, n, width), np.float32), np.zeros((3, n, width), np.float32)
        for row, seed in enumerate(seeds):
            length = int(batch.attention_mask[row].sum())      # padding depends on the number of workers
            masking[:, row, :length], noise[1:, row, :length] = np.random.default_rng(int(seed)).random((2, 2, length))
        special = torch.from_numpy(np.isin(batch.input_ids.numpy(), tokenizer.all_special_ids))
        masked = torch.from_numpy(masking < self.config.masked) & ~special         # (2, n, S)
        views = batch.input_ids.masked_fill(masked, int(tokenizer.mask_token_id))
        return replace(
            batch,
            input_ids=torch.cat([batch.input_ids, *views]),
            attention_mask=batch.attention_mask.repeat(3, 1),
            noise=torch.from_numpy(noise).flatten(0, 1),
        )

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode two views, let the discriminator look for replaced tokens, then leave autocast for the losses."""
        assert batch.noise is not None
        n = len(batch.input_ids) // 3
        sentences, masked = batch.input_ids[:n].repeat(2, 1), batch.input_ids[n:]
        mask = batch.attention_mask[n:]
        projected = self.projector(self.encoder(sentences, mask).embedding, world)
        filled = self.fill(sentences, masked, mask, batch.noise[n:])
        logits = self.discriminator(filled, mask, projected)
        with full_precision(mask.device):
            first, second = F.normalize(projected, dim=-1).chunk(2)
            return self.loss(first, second, logits.float(), filled != sentences, mask, world)

    @torch.no_grad()
    def fill(self, sentences: Tensor, masked: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
        """(B, S) the sentences, with tokens of the generator where ``masked`` has others than they."""
        places = masked != sentences
        logits = self.generator.on(mask.device)(input_ids=masked, attention_mask=mask).logits[places].float()
        filled = sentences.clone()
        filled[places] = draw(logits, noise[places]) if self.config.fill == "sampled" else logits.argmax(dim=-1)
        return filled

    def loss(
        self, first: Tensor, second: Tensor, logits: Tensor, replaced: Tensor, mask: Tensor, world: World
    ) -> tuple[Tensor, Metrics]:
        """Of this worker's (n, D) unit views, and of all its tokens (2n, S)."""
        targets = own_rows(world, len(first), first.device)
        contrast = info_nce(first, world.gather(second), targets, self.config.temperature)
        tokens = world.mean(mask.float().sum())                # of a worker on average: workers' tokens are not as many
        detection = (replaced_token_losses(logits, replaced) * mask).sum() / tokens
        right = ((logits > 0) == replaced) * mask
        loss = contrast + self.config.replaced_weight * detection
        metrics = {
            "loss": loss,
            "loss_contrast": contrast,
            "loss_replaced": detection,
            "positive_cosine": (first * second).sum(dim=-1).mean(),
            "replaced_tokens": (replaced * mask).sum() / tokens,
            "detection_accuracy": right.sum() / tokens,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


class BatchNormHead(nn.Module):
    """Dense to twice the size, batch normalisation, ReLU, dense, batch normalisation without scale and shift.

    The statistics are those of the global batch. It is used in training alone, so it keeps no running ones.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.widen = nn.Linear(dimension, 2 * dimension, bias=False)
        self.scale = nn.Parameter(torch.ones(2 * dimension))
        self.shift = nn.Parameter(torch.zeros(2 * dimension))
        self.narrow = nn.Linear(2 * dimension, dimension, bias=False)

    def forward(self, embedding: Tensor, world: World) -> Tensor:
        """(B, D) -> (B, D) float32."""
        wide = self.widen(embedding.to(self.widen.weight.dtype))
        with full_precision(embedding.device):
            hidden = F.relu(standardised(wide.float(), world) * self.scale + self.shift)
        narrow = self.narrow(hidden.to(self.narrow.weight.dtype))
        with full_precision(embedding.device):
            return standardised(narrow.float(), world)


def standardised(rows: Tensor, world: World) -> Tensor:
    """(B, D) of each worker, less the mean and over the deviation of each column among all workers' rows."""
    variance, mean = torch.var_mean(world.gather(rows), dim=0, correction=0)
    return (rows - mean) * (variance + 1e-5).rsqrt()


class Discriminator(nn.Module):
    """A copy of the encoder's backbone that reads an embedding in the first token's place, and judges each token."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        original: Any = encoder.backbone
        self.backbone = type(original)(original.config, add_pooling_layer=False)
        self.backbone.load_state_dict(original.state_dict())
        self.judge = nn.Linear(encoder.dimension, 1)
        self._condition: Tensor | None = None
        self.backbone.embeddings.register_forward_hook(self._put_first)

    def _put_first(self, _module: nn.Module, _inputs: Any, vectors: Tensor) -> Tensor:
        assert self._condition is not None
        return torch.cat([self._condition[:, None].to(vectors.dtype), vectors[:, 1:]], dim=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, condition: Tensor) -> Tensor:
        """(B, S) ids and mask, (B, d) embeddings -> (B, S) logits, higher where a token seems replaced."""
        self._condition = condition
        try:
            states = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        finally:
            self._condition = None
        logits: Tensor = self.judge(states).squeeze(-1)
        return logits


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """(M, V) logits and (M,) numbers in [0, 1) -> (M,) tokens with the softmax's chances."""
    below = logits.softmax(dim=-1).cumsum(dim=-1)
    places = torch.searchsorted(below, (noise[:, None] * below[:, -1:]).contiguous(), right=True)
    return places.squeeze(1).clamp(max=logits.shape[1] - 1)


def load_generator(name: str, encoder: Encoder) -> nn.Module:
    """A masked language model in float32.

    Raises:
        InputError: there is none of that name, it lacks its head, or its vocabulary is not the encoder's.
    """
    model, has_head = load_masked_lm(name, "train.method.generator")
    if not has_head:
        raise InputError(
            f"train.method.generator={name!r} has no head that predicts masked tokens; name a masked language model "
            "of the encoder's vocabulary"
        )
    words = encoder.backbone.config.vocab_size                 # type: ignore[union-attr]
    if model.config.vocab_size != words:
        raise InputError(
            f"train.method.generator={name!r} has {model.config.vocab_size} tokens and the encoder {words}; name one "
            "of the encoder's vocabulary"
        )
    generator: nn.Module = model
    return generator
