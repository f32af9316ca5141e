"""RankCSE: SimCSE whose two views rank the batch alike, and as a trained encoder, the teacher, ranks it."""

from collections.abc import Callable
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from cluster.errors import InputError
from cluster.world import World
from stages.encoder import (
    Encoder,
    EncoderConfig,
    Pooling,
    check_encoder,
    check_poolings,
    load_tokenizer,
    max_positions,
    resolve,
    saved_config,
)
from stages.methods.base import (
    MLP,
    Batch,
    Beside,
    Method,
    MethodSettings,
    Metrics,
    full_precision,
    own_rows,
    two_views,
)
from stages.methods.functional import info_nce
from stages.methods.listwise import listmle, listnet, ranking_consistency


class RankCSEConfig(MethodSettings):
    """RankCSE, arXiv:2305.16726."""

    name: Literal["rankcse"]
    teacher: str                                               # hub name, folder or all-MiniLM-L6-v2
    second_teacher: str | None = None                          # another, averaged with the first
    teacher_weight: Annotated[float, Field(ge=0, le=1)] = 1 / 3  # alpha, of the first of two teachers
    teacher_pooling: Pooling = "cls"                           # where a teacher's folder does not say its own
    distillation: Literal["listmle", "listnet"] = "listmle"
    consistency_weight: NonNegativeFloat = 1.0                 # beta
    distillation_weight: NonNegativeFloat = 1.0                # gamma
    temperature: PositiveFloat = 0.05                          # tau_1, of contrast and consistency
    student_temperature: PositiveFloat = 0.05                  # tau_2, of the student's list in distillation
    teacher_temperature: PositiveFloat = 0.025                 # tau_3, of the teacher's in listnet
    mlp: MLP = "train-only"

    @property
    def teachers(self) -> tuple[str, ...]:
        """Their names."""
        return (self.teacher,) if self.second_teacher is None else (self.teacher, self.second_teacher)

    @property
    def reads_encoders(self) -> tuple[str, ...]:
        """The teachers."""
        return self.teachers

    def located(self, absolute: Callable[[str], str]) -> Self:
        """With the teachers' folders made absolute."""
        second = None if self.second_teacher is None else absolute(self.second_teacher)
        return self.model_copy(update={"teacher": absolute(self.teacher), "second_teacher": second})

    def check_encoder(self, encoder: EncoderConfig) -> None:
        """Refuse teachers that cannot read what the encoder reads: they are given its tokens.

        Raises:
            InputError: with the setting to change.
        """
        vocabulary = load_tokenizer(encoder.name).get_vocab()
        for setting, teacher in zip(("teacher", "second_teacher"), self.teachers, strict=False):
            try:
                check_encoder(teacher)
                check_poolings(teacher, (self.teacher_config(teacher).pooling,))
                other = load_tokenizer(teacher).get_vocab()
            except InputError as error:
                raise InputError(f"train.method.{setting}: {error}".replace("encoder.name", setting)) from error
            if saved_config(resolve(teacher)) is None and self.teacher_pooling == "layer-attention":
                raise InputError(
                    f"train.method.{setting}={teacher} has no layer-attention pooling; set "
                    f"train.method.teacher_pooling to cls or mean, or give an encoder trained with it"
                )
            if other != vocabulary:
                raise InputError(
                    f"train.method.{setting}={teacher} has another vocabulary ({len(other)} tokens) than "
                    f"encoder.name={encoder.name} ({len(vocabulary)} tokens), whose tokens it is given; "
                    f"use a teacher of the same family"
                )
            if max_positions(teacher) < encoder.max_length:
                raise InputError(
                    f"encoder.max_length={encoder.max_length} is more than the {max_positions(teacher)} positions of "
                    f"train.method.{setting}={teacher}; it may be 3 to {max_positions(teacher)}"
                )

    def teacher_config(self, teacher: str) -> EncoderConfig:
        """How a teacher pools."""
        return saved_config(resolve(teacher)) or EncoderConfig(name=teacher, pooling=self.teacher_pooling)

    def build(self, encoder: Encoder) -> "RankCSE":
        """The module to train."""
        return RankCSE(encoder, self)


class RankCSE(Method):
    """l = l_InfoNCE + beta l_consistency + gamma l_distillation."""

    def __init__(self, encoder: Encoder, config: RankCSEConfig) -> None:
        super().__init__(encoder, config.mlp)
        self.config = config
        self.teachers = [Beside(Encoder.load(name, config.teacher_config(name))) for name in config.teachers]

    def forward(self, batch: Batch, world: World) -> tuple[Tensor, Metrics]:
        """Encode both views in one pass, let the teachers rank the batch, then leave autocast for the loss."""
        first, second = (
            self.head(view.embedding) for view in two_views(self.encoder, batch)
        )
        with full_precision(first.device):
            taught = self.taught(batch, world)
            return self.loss(F.normalize(first, dim=-1), F.normalize(second, dim=-1), taught, world)

    @torch.no_grad()
    def taught(self, batch: Batch, world: World) -> Tensor:
        """(n, N) the teachers' cosines of this worker's sentences to all, averaged where there are two."""
        lists = []
        for teacher in self.teachers:
            encoding = teacher.on(batch.input_ids.device)(batch.input_ids, batch.attention_mask)
            units = F.normalize(encoding.embedding, dim=-1)
            lists.append(units @ world.gather(units).T)
        weight = self.config.teacher_weight
        return lists[0] if len(lists) == 1 else weight * lists[0] + (1 - weight) * lists[1]

    def loss(self, first: Tensor, second: Tensor, taught: Tensor, world: World) -> tuple[Tensor, Metrics]:
        """The weighted sum of the three losses of this worker's (n, D) unit vectors, against the global batch."""
        config = self.config
        targets = own_rows(world, len(first), first.device)
        all_first, all_second = world.gather(first), world.gather(second)
        cosines = first @ all_second.T                                             # (n, N)
        instance = info_nce(first, all_second, targets, config.temperature)
        consistency = ranking_consistency(cosines / config.temperature, second @ all_first.T / config.temperature)
        student = cosines / config.student_temperature
        if config.distillation == "listmle":
            distillation = listmle(student, taught)
        else:
            distillation = listnet(student, taught / config.teacher_temperature, targets)
        loss = instance + config.consistency_weight * consistency + config.distillation_weight * distillation
        metrics = {
            "loss": loss,
            "loss_instance": instance,
            "loss_consistency": consistency,
            "loss_distillation": distillation,
            "positive_cosine": (first * second).sum(dim=-1).mean(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}
