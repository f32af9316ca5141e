"""Figures that papers report on the seven STS sets, to hold one's own against.

All are Spearman's correlation × 100 over all pairs of a test set together, as in this project's tables.
"""

import re
from dataclasses import dataclass
from pathlib import Path

FALLBACK = "BERT-base"                                         # what most papers report first


@dataclass(frozen=True)
class Published:
    """A row of a paper's table, as printed.

    ``scores`` are in the order of ``config.STS_TASKS``; None where only the average is known.
    """

    model: str
    backbone: str
    scores: tuple[float, ...] | None
    average: float
    source: str
    labelled: bool = False                                     # trained on labelled pairs (natural language inference)


_SIMCSE = "Gao et al. 2021, arXiv:2104.08821, unsupervised"
_IS_CSE = "He et al. 2023, arXiv:2305.07424"
_CLUSTER_NS = "Deng et al. 2023, arXiv:2305.09892"
_APINCSE = "the paper's text, which states the distance to the best figure before it"

PUBLISHED = (
    Published("SimCSE", "BERT-base", (68.40, 82.41, 74.38, 80.91, 78.56, 76.85, 72.23), 76.25, _SIMCSE),
    Published("SimCSE", "BERT-large", (70.88, 84.16, 76.43, 84.50, 79.76, 79.26, 73.88), 78.41, _SIMCSE),
    Published("SimCSE", "RoBERTa-base", (70.16, 81.77, 73.24, 81.36, 80.65, 80.22, 68.56), 76.57, _SIMCSE),
    Published("SimCSE", "RoBERTa-large", (72.86, 83.99, 75.62, 84.77, 81.80, 81.98, 71.26), 78.90, _SIMCSE),
    Published("ClusterNS", "BERT-base", None, 77.55, _CLUSTER_NS),
    Published("ClusterNS", "BERT-large", None, 79.19, _CLUSTER_NS),
    Published("ClusterNS", "RoBERTa-base", None, 77.98, _CLUSTER_NS),
    Published("ClusterNS", "RoBERTa-large", None, 79.43, _CLUSTER_NS),
    Published("IS-CSE", "BERT-base", None, 78.30, _IS_CSE),
    Published("IS-CSE", "BERT-large", None, 79.47, _IS_CSE),
    Published("IS-CSE", "RoBERTa-base", None, 77.73, _IS_CSE),
    Published("IS-CSE", "RoBERTa-large", None, 79.42, _IS_CSE),
    Published("APINCSE", "BERT-base", None, 78.64, _APINCSE),
    Published("APINCSE", "BERT-large", None, 79.53, _APINCSE),
    Published("APINCSE", "RoBERTa-large", None, 79.51, _APINCSE),
    Published(
        "SBERT-NLI", "BERT-base", (70.97, 76.53, 73.19, 79.09, 74.30, 77.03, 72.91), 74.89,
        "Reimers and Gurevych 2019, arXiv:1908.10084", labelled=True,
    ),
    Published(
        "AnglE-NLI", "BERT-base", (75.09, 85.56, 80.66, 86.44, 82.47, 85.16, 81.23), 82.37,
        "Li and Li 2023, arXiv:2309.12871", labelled=True,
    ),
)  # fmt: skip


def backbone_of(encoder: str) -> str | None:
    """BERT-base, BERT-large, RoBERTa-base or RoBERTa-large, if an encoder's hub name or folder says so; else None.

    Relatives of another name (DistilRoBERTa, XLM-RoBERTa, ALBERT, DeBERTa) are none of these.
    """
    found = re.search(r"(?<![a-z])(?<!xlm[-_])(ro)?bert(?:a)?[-_](base|large)(?![a-z])", Path(encoder).name.casefold())
    return f"{'RoBERTa' if found[1] else 'BERT'}-{found[2]}" if found else None


def published_for(encoder: str) -> tuple[Published, ...]:
    """The rows of the encoder's own backbone; those of BERT-base where its name does not tell."""
    backbone = backbone_of(encoder) or FALLBACK
    return tuple(row for row in PUBLISHED if row.backbone == backbone)
