"""All methods: the union of their configs, told apart by ``name``, and the data that each learns from."""

from typing import Annotated, get_args

from pydantic import Field

from cluster.errors import InputError
from stages.methods.angle import AnglEConfig
from stages.methods.apincse import APINCSEConfig
from stages.methods.arccse import ArcCSEConfig
from stages.methods.clusterns import ClusterNSConfig
from stages.methods.consert import ConSERTConfig
from stages.methods.cosent import CoSENTConfig
from stages.methods.diffcse import DiffCSEConfig
from stages.methods.esimcse import ESimCSEConfig
from stages.methods.iscse import ISCSEConfig
from stages.methods.rankcse import RankCSEConfig
from stages.methods.sbert import SBERTConfig
from stages.methods.sg_opt import SGOPTConfig
from stages.methods.siamese import SiameseConfig
from stages.methods.simcse import SimCSEConfig, SupervisedSimCSEConfig
from stages.methods.sncse import SNCSEConfig
from stages.methods.wsscse import WSSCSEConfig

AnyMethod = (
    APINCSEConfig
    | SimCSEConfig
    | ISCSEConfig
    | ClusterNSConfig
    | RankCSEConfig
    | ArcCSEConfig
    | SupervisedSimCSEConfig
    | CoSENTConfig
    | AnglEConfig
    | SBERTConfig
    | SiameseConfig
    | SNCSEConfig
    | DiffCSEConfig
    | SGOPTConfig
    | WSSCSEConfig
    | ESimCSEConfig
    | ConSERTConfig
)

MethodConfig = Annotated[AnyMethod, Field(discriminator="name")]

METHODS = tuple(str(get_args(config.model_fields["name"].annotation)[0]) for config in get_args(AnyMethod))
"""Their names."""

UNLABELLED = ("sentences",)
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
    wanted = LABELLED.get(method, UNLABELLED)
    if kind not in wanted:
        others = [name for name in METHODS if kind in LABELLED.get(name, UNLABELLED)]
        raise InputError(
            f"train.method.name={method} learns from {' or '.join(wanted)}, not from corpus.kind={kind}; "
            f"set corpus.kind={wanted[0]} with such data, or a method that takes {kind}: {', '.join(others)}"
        )
