"""ConSERT: two views of a sentence by shuffled tokens, or embeddings with parts set to zero, find each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from cluster.world import World
from stages.encoder import Encoder
from stages.methods.base import Batch, Method, MethodSettings, Metrics, full_precision, own_rows
from stages.methods.functional import nt_xent
from stages.methods.repetition import left_out

Augmentation = Literal["none", "shuffle", "token-cutoff", "feature-cutoff", "dropout"]


class ConSERTConfig(MethodSettings):
    """Unsupervised ConSERT, arXiv:2105.11741; the paper turns the encoder's own dropout off (``train.dropout=0``)."""

    needs_whole_batches: ClassVar[bool] = True                 # changes the embeddings of both views at once

    name: Literal["consert"]
    temperature: PositiveFloat = 0.1
    first: Augmentation = "feature-cutoff"                     # of the first view
    second: Augmentation = "shuffle"
    rate: Annotated[float, Field(gt=0, lt=1)] = 0.2            # of a sentence's tokens, features or single numbers that
                                                               # cutoff and dropout set to zero

    def build(self, encoder: Encoder) -> "ConSERT":
        """The module to train."""
        return ConSERT(encoder, self)


class ConSERT(Method):
    """NT-Xent between two augmented views, each sentence of either being an anchor."""

    def __init__(self, encoder: Encoder, config: ConSERTConfig) -> None:
        super().__init__(encoder)
        self.config = config

    def augment(self, batch: Batch, seeds: NDArray[np.uint64], tokenizer: PreTrainedTokenizerFast) -> Batch:
        """Both views' tokens, shuffled where the view is; what zeroes embeddings comes in the forward pass.

        Special tokens stay in their places, so that [CLS] comes first under every pooling.
        """
        special = torch.from_numpy(left_out(tokenizer).special)
        views = batch.input_ids.repeat(2, 1)
        for row, seed in enumerate(seeds):
            random = np.random.default_rng(int(seed))
            for view, augmentation in enumerate((self.config.first, self.config.second)):
                if augmentation == "shuffle":
                    tokens = views[view * len(seeds) + row]
                    words = (~torch.isin(tokens, special)).nonzero()[:, 0]
                    tokens[words] = tokens[words][random.permutation(len(words))]
        return replace(batch, input_ids=views, attention_mask=batch.attention_mask.repeat(2, 1))

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode both views in one pass, then leave autocast for the loss."""

        def augmented(embeddings: Tensor) -> Tensor:
            kept = [
                kept_numbers(part, mask, augmentation, self.config.rate)
                for part, mask, augmentation in zip(
                    embeddings.chunk(2), batch.attention_mask.chunk(2), (self.config.first, self.config.second),
                    strict=True,
                )
            ]  # fmt: skip
            return embeddings * torch.cat(kept)

        with changed_output(self.encoder.backbone.embeddings, augmented):  # type: ignore[arg-type]
            embeddings = self.encoder(batch.input_ids, batch.attention_mask).embedding
        with full_precision(embeddings.device):
            first, second = F.normalize(embeddings, dim=-1).chunk(2)
            targets = own_rows(world, len(first), first.device)
            loss = nt_xent(
                first, second, world.gather(first), world.gather(second), targets, self.config.temperature
            )
            cosine = (first * second).sum(dim=-1).mean()
        return loss, {"loss": loss.detach(), "positive_cosine": cosine.detach()}


@contextmanager
def changed_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have a module's output changed before anybody else sees it."""

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return change(output)

    handle = module.register_forward_hook(hook, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def kept_numbers(embeddings: Tensor, mask: Tensor, augmentation: Augmentation, rate: float) -> Tensor:
    """What an augmentation leaves of embeddings: 1 for kept, 0 for set to zero; nothing is scaled up.

    It is drawn as dropout is, from the worker's own generator of random numbers.

    Args:
        embeddings: (B, S, d), the output of the embedding layer.
        mask: (B, S) 1 for tokens.
        augmentation: which; all is kept but under cutoff and dropout.
        rate: so much, rounded down, of each sentence's tokens, of its d features, or of its single numbers.

    Returns:
        (B, S, d) in the precision of the embeddings.

    Source: ConSERT, section 3.2, arXiv:2105.11741.
    """
    tokens, (rows, length, features) = mask.sum(dim=1), embeddings.shape
    lots = partial(torch.rand, device=embeddings.device)
    match augmentation:
        case "token-cutoff":
            drawn = lots(rows, length).masked_fill(mask == 0, torch.inf)
            kept = not_among_the_lowest(drawn, (rate * tokens.double()).long())[:, :, None]
        case "feature-cutoff":
            count = torch.full_like(tokens, int(rate * features))
            kept = not_among_the_lowest(lots(rows, features), count)[:, None]
        case "dropout":
            drawn = lots(rows, length, features).masked_fill((mask == 0)[:, :, None], torch.inf).flatten(1)
            kept = not_among_the_lowest(drawn, (rate * features * tokens.double()).long()).reshape(embeddings.shape)
        case _:
            kept = torch.ones_like(mask, dtype=torch.bool)[:, :, None]
    return kept.expand_as(embeddings).to(embeddings.dtype)


def not_among_the_lowest(drawn: Tensor, count: Tensor) -> Tensor:
    """(B, M) numbers, (B,) counts -> (B, M) bool, false for each row's ``count`` lowest."""
    return drawn.argsort(dim=1).argsort(dim=1) >= count[:, None]
