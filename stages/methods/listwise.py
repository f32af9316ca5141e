"""How two lists of similarities rank a batch's sentences alike, as pure functions.

A row i of a (B, N) list has anchor i's cosines to the N sentences of the global batch.
"""

import torch
from torch import Tensor


def ranking_consistency(first: Tensor, second: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of two rankings, each a softmax over its list.

    Args:
        first: (B, N) logits: cosines of first views to second views, divided by a temperature.
        second: (B, N) logits: cosines of the same sentences' second views to first views.

    Returns:
        () mean over rows, in nats; 0 to log 2.

    Source: RankCSE, section 4.2, arXiv:2305.16726.
    """
    p, q = first.log_softmax(dim=1), second.log_softmax(dim=1)
    middle = torch.stack([p, q]).logsumexp(dim=0) - torch.log(p.new_tensor(2.0))
    divergence = p.exp() * (p - middle) + q.exp() * (q - middle)
    return divergence.sum(dim=1).mean() / 2


def listnet(student: Tensor, teacher: Tensor, itself: Tensor) -> Tensor:
    """Cross-entropy of the teacher's and the student's chances of each sentence to be ranked first.

    Args:
        student: (B, N) logits.
        teacher: (B, N) logits, without gradients.
        itself: (B,) int64, the anchor's own column, which takes no part: it would have nearly all of the chances, for
            a teacher without dropout gives a sentence a cosine of 1 to itself.

    Returns:
        () mean over rows, in nats; 0 where there are no other sentences.

    Source: RankCSE, section 4.3, arXiv:2305.16726.
    """
    own = torch.zeros_like(student, dtype=torch.bool).scatter(1, itself[:, None], True)
    others = student.shape[1] - 1
    kept_student, kept_teacher = (logits[~own].reshape(len(student), others) for logits in (student, teacher))
    return -(kept_teacher.softmax(dim=1) * kept_student.log_softmax(dim=1)).sum(dim=1).mean()


def listmle(student: Tensor, teacher: Tensor) -> Tensor:
    """-log of the student's chance of the teacher's whole order, drawn without replacement from its softmax.

    Args:
        student: (B, N) logits.
        teacher: (B, N), of which only the order counts; of equal ones the first comes first.

    Returns:
        () mean over rows, in nats: a sum over the N places of a list, so it grows with N.

    Source: RankCSE, section 4.3, arXiv:2305.16726.
    """
    order = teacher.argsort(dim=1, descending=True, stable=True)
    ordered = student.gather(1, order)
    remaining = ordered.flip(1).logcumsumexp(dim=1).flip(1)                        # over a place and all after it
    return (remaining - ordered).sum(dim=1).mean()
