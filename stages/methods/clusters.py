"""K-means a batch at a time, and the loss of sentences that fall into one cluster, as pure functions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.methods.functional import outside_margins


def scattered_centroids(points: Tensor, cosines: Tensor, k: int) -> Tensor:
    """K points of a batch to begin with, each as unlike the one before as can be.

    Args:
        points: (N, D) first views, not normalised; N >= k.
        cosines: (N, N) of each first view to all second views.
        k: centroids wanted.

    Returns:
        (k, D). The paper draws the first at random; here it is the batch's first row, which is as random and the same
        on every worker.

    Source: ClusterNS, section 3.2, arXiv:2305.09892.
    """
    free = torch.ones(len(points), dtype=torch.bool, device=points.device)
    chosen = [0]
    for _ in range(k - 1):
        free[chosen[-1]] = False
        chosen.append(int(cosines[chosen[-1]].masked_fill(~free, torch.inf).argmin()))
    return points[chosen]


def moved_centroids(centroids: Tensor, points: Tensor, momentum: float) -> Tensor:
    """Centroids after a step towards the points that are nearest to them; one without points stays where it is.

    Args:
        centroids: (K, D).
        points: (N, D), not normalised.
        momentum: gamma, the part of a step; 0 to 1.

    Returns:
        (K, D): (1 - gamma) c + gamma times the sum of the cluster's points. A sum, as the authors' code computes it:
        only directions count later, and a large cluster turns its centroid faster than under a mean.

    Source: ClusterNS, section 3.2, arXiv:2305.09892.
    """
    members = F.one_hot(assigned(points, centroids), len(centroids)).T.to(points.dtype)    # (K, N)
    moved = (1 - momentum) * centroids + momentum * (members @ points)             # no index_add: its order may vary
    return torch.where(members.any(dim=1, keepdim=True), moved, centroids)


def assigned(points: Tensor, centroids: Tensor) -> Tensor:
    """(N,) int64, which of (K, D) centroids is nearest to each of (N, D) points by cosine."""
    return _cosines(points, centroids).argmax(dim=1)


def second_nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """(N, D), of (K, D) centroids the one nearest to each of (N, D) points after its own: a hard negative."""
    return centroids[_cosines(points, centroids).topk(2, dim=1).indices[:, 1]]


def _cosines(points: Tensor, centroids: Tensor) -> Tensor:
    return F.normalize(points, dim=-1) @ F.normalize(centroids, dim=-1).T          # (N, K)


def bidirectional_margin_loss(
    cosines: Tensor, targets: Tensor, false_negatives: Tensor, alpha: float, beta: float
) -> Tensor:
    """Keep a false negative less like the anchor than its positive is, by at least alpha and at most beta.

    Args:
        cosines: (B, N) of anchors and candidates.
        targets: (B,) int64, the column of anchor i's positive.
        false_negatives: (B, N) bool, which candidates share the anchor's cluster; not the positive itself.
        alpha: the least difference; >= 0.
        beta: the greatest.

    Returns:
        () the sum over false negatives, divided by B N: the authors' mean, without what other pairs add to it as a
        constant.

    Source: ClusterNS, section 3.3, arXiv:2305.09892; SNCSE, arXiv:2201.05979.
    """
    differences = cosines - cosines.gather(1, targets[:, None])
    return outside_margins(differences, alpha, beta).masked_fill(~false_negatives, 0.0).mean()
