"""All methods: the union of their configs, told apart by ``name``, and the data that each learns from."""

from typing import Annotated

from pydantic import Field

from cluster.errors import InputError
from stages.methods.angle import AnglEConfig
from stages.methods.apincse import APINCSEConfig
from stages.methods.cosent import CoSENTConfig
from stages.methods.sbert import SBERTConfig
from stages.methods.siamese import SiameseConfig
from stages.methods.simcse import SimCSEConfig, SupervisedSimCSEConfig

MethodConfig = Annotated[
    APINCSEConfig
    | SimCSEConfig
    | SupervisedSimCSEConfig
    | CoSENTConfig
    | AnglEConfig
    | SBERTConfig
    | SiameseConfig,
    Field(discriminator="name"),
]

PAIRS = ("scored-pairs", "binary-pairs")
TRIPLETS = ("triplets", "nli")

LABELLED = {
    "cosent": PAIRS,
    "angle": PAIRS,
    "sbert": PAIRS,
    "siamese": PAIRS,
    "simcse-supervised": TRIPLETS,
}
"""Methods that learn from labelled data: the kinds of ``corpus.kind`` that they take; all others take sentences."""


def check_kind(method: str, kind: str) -> None:
    """Refuse data that a method cannot learn from.

    Args:
        method: its name.
        kind: ``corpus.kind``.

    Raises:
        InputError: with the kinds that the method takes and the methods that take the kind.
    """
    wanted = LABELLED.get(method, ("sentences",))
    if kind not in wanted:
        others = [name for name, kinds in LABELLED.items() if kind in kinds] or ["apincse", "simcse"]
        raise InputError(
            f"train.method.name={method} learns from {' or '.join(wanted)}, not from corpus.kind={kind}; "
            f"set corpus.kind={wanted[0]} with such data, or a method that takes {kind}: {', '.join(others)}"
        )
