"""The losses, as pure functions on tensors. Vectors are float32; cosines are dot products of unit vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor


def info_nce(anchors: Tensor, candidates: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding each anchor's positive among all candidates.

    Args:
        anchors: (B, D) unit vectors.
        candidates: (N, D) unit vectors.
        targets: (B,) int64, the row of ``candidates`` that is anchor i's positive.
        temperature: divides cosines in [-1, 1]; > 0, unitless.

    Returns:
        () mean over anchors, in nats; log N at chance.

    Source: SimCSE, equation 1, arXiv:2104.08821; APINCSE, equations 8 and 15.
    """
    return F.cross_entropy(anchors @ candidates.T / temperature, targets)


def hard_negative_info_nce(
    anchors: Tensor,
    candidates: Tensor,
    negatives: Tensor,
    targets: Tensor,
    temperature: float,
    negative_temperature: float,
) -> Tensor:
    """Cross-entropy of finding each anchor's positive among all candidates and all hard negatives.

    Args:
        anchors: (B, D) unit vectors.
        candidates: (N, D) unit vectors.
        negatives: (M, D) unit vectors, each a hard negative of every anchor.
        targets: (B,) int64, the row of ``candidates`` that is anchor i's positive.
        temperature: divides the cosines to the candidates.
        negative_temperature: divides the cosines to the negatives; 1 is the paper's formula as printed.

    Returns:
        () mean over anchors, in nats.

    Source: APINCSE, equation 19; SimCSE, equation 5, with equal temperatures.
    """
    logits = torch.cat([anchors @ candidates.T / temperature, anchors @ negatives.T / negative_temperature], dim=1)
    return F.cross_entropy(logits, targets)


def own_negative_info_nce(
    anchors: Tensor,
    candidates: Tensor,
    negatives: Tensor,
    targets: Tensor,
    temperature: float,
    negative_temperature: float,
) -> Tensor:
    """Like :func:`hard_negative_info_nce`, with (B, D) ``negatives`` of which anchor i meets the i-th alone.

    Source: APINCSE, equation 19, read without a sum over the batch in its second term.
    """
    own = (anchors * negatives).sum(dim=1, keepdim=True) / negative_temperature
    return F.cross_entropy(torch.cat([anchors @ candidates.T / temperature, own], dim=1), targets)


def nearest(queries: Tensor, rows: Tensor, k: int, excluded: Tensor | None) -> Tensor:
    """The k rows of a neighbourhood that are most similar to each query.

    Args:
        queries: (B, D) unit vectors.
        rows: (F, D) unit vectors.
        k: neighbours wanted; fewer come back while F is smaller.
        excluded: (B,) int64, the row that query i must not find (its own copy), or None.

    Returns:
        (B, k', D) with k' = min(k, F, or F - 1 where a row is excluded).

    Source: APINCSE, equations 10-12.
    """
    cosines = queries @ rows.T                                                     # (B, F)
    available = len(rows)
    if excluded is not None:
        cosines = cosines.scatter(1, excluded[:, None], -torch.inf)
        available -= 1
    return rows[cosines.topk(min(k, available), dim=1).indices]


def augmented_positives(positives: Tensor, neighbours: Tensor, beta: float) -> Tensor:
    """Each positive's weighted mean with its neighbours.

    Args:
        positives: (B, D), unit vectors or raw ones: the paper leaves it open.
        neighbours: (B, k, D) unit vectors without gradients.
        beta: divides the dot products in the softmax; > 0.

    Returns:
        (B, D), not normalised.

    Source: APINCSE, equations 13-14.
    """
    stacked = torch.cat([positives[:, None], neighbours], dim=1)                   # (B, 1 + k, D)
    weights = (stacked @ positives[:, :, None] / beta).softmax(dim=1)              # (B, 1 + k, 1)
    return (weights * stacked).sum(dim=1)


def nearest_layer(layers: Tensor) -> Tensor:
    """The intermediate layer whose vector is most similar to the last layer's, for each sentence.

    Args:
        layers: (T+1, B, d) vectors of the embeddings and of layers 1..T.

    Returns:
        (B,) int64 in 1..T-1.

    Source: APINCSE, equations 16-17.
    """
    cosines = F.cosine_similarity(layers[1:-1].float(), layers[-1:].float(), dim=-1)   # (T-1, B)
    return cosines.argmax(dim=0) + 1
