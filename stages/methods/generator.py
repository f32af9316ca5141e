"""The masked language model that fills in what a method has masked."""

import logging
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from cluster.errors import InputError, first_line
from stages.encoder import Encoder, load_tokenizer, quiet_loading, resolve

log = logging.getLogger(__name__)

Choice = Literal["argmax", "sampled"]
"""How a token is chosen: the most likely one, or one drawn by its probability."""


class Generator(nn.Module):
    """A masked-LM head upon the states of the encoder that is trained, or upon those of a model of its own."""

    def __init__(self, head: nn.Module, backbone: nn.Module | None, special: list[int]) -> None:
        super().__init__()
        self.head = head
        self.backbone = backbone
        self.register_buffer("special", torch.tensor(special), persistent=False)

    @classmethod
    def load(cls, encoder: Encoder, own: bool) -> "Generator":
        """The masked-LM head, and with ``own`` the backbone, of the encoder's checkpoint.

        A head of a checkpoint that has none starts at random, with a warning. The decoder is tied to the word
        embeddings: to the encoder's, or to the own backbone's.

        Raises:
            InputError: the checkpoint cannot be loaded.
        """
        name, config = encoder.config.name, encoder.backbone.config
        dropout = {key: getattr(config, key) for key in ("hidden_dropout_prob", "attention_probs_dropout_prob")}
        model, has_head = load_masked_lm(name, "encoder.name", **dropout)
        if not has_head:
            log.warning("%s has no masked-LM head: the generator's starts at random and has to be learnt", name)
        if not own:
            model.get_output_embeddings().weight = encoder.backbone.get_input_embeddings().weight  # type: ignore[operator]
        head = model.cls if hasattr(model, "cls") else model.lm_head
        return cls(head, model.base_model if own else None, load_tokenizer(name).all_special_ids)

    def forward(self, encoder: Encoder, input_ids: Tensor, attention_mask: Tensor, places: Tensor) -> Tensor:
        """Logits of what stands at the masked places.

        Args:
            encoder: whose states are taken where the generator has no backbone.
            input_ids: (n, S) with masks.
            attention_mask: (n, S).
            places: (n, S) bool, m of them true.

        Returns:
            (m, V) in row order.
        """
        backbone = encoder.backbone if self.backbone is None else self.backbone
        states = backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits: Tensor = self.head(states[places])
        return logits

    def choose(self, logits: Tensor, choice: Choice) -> Tensor:
        """(m, V) logits -> (m,) tokens, none of them a special one, without gradients.

        What is sampled is drawn as dropout is, from the worker's own generator of random numbers.
        """
        ordinary = logits.detach().float().index_fill(1, self.special, -torch.inf)  # type: ignore[arg-type]
        if choice == "argmax":
            return ordinary.argmax(dim=1)
        return torch.multinomial(ordinary.softmax(dim=1), 1).squeeze(1)


def load_masked_lm(name: str, setting: str, **overrides: float) -> tuple[Any, bool]:
    """A masked language model in float32, and whether its checkpoint has the head that predicts tokens.

    Args:
        name: hub name or folder.
        setting: that names it, for the message.
        overrides: of its config.

    Raises:
        InputError: there is none of that name, or its weights cannot be loaded.
    """
    try:
        with quiet_loading():
            model, loaded = AutoModelForMaskedLM.from_pretrained(
                resolve(name), dtype=torch.float32, output_loading_info=True, **overrides
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{setting}={name!r} cannot be loaded as a masked language model ({first_line(error)}); it may be a hub "
            "name or a folder"
        ) from error
    return model, all(key.startswith(f"{model.base_model_prefix}.") for key in loaded["missing_keys"])
