"""The losses, as pure functions on tensors. Vectors are float32; cosines are dot products of unit vectors."""

import math

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

    Source: SimCSE, equation 1, arXiv:2104.08821; APINCSE, equations 8 and 15; ESimCSE, equation 6, arXiv:2109.04380,
    with its queue among the candidates.
    """
    return F.cross_entropy(anchors @ candidates.T / temperature, targets)


def nt_xent(
    first: Tensor, second: Tensor, all_first: Tensor, all_second: Tensor, targets: Tensor, temperature: float
) -> Tensor:
    """Cross-entropy of finding a sentence's other view among all other sentences of both views.

    Args:
        first: (B, D) unit vectors of this worker's first views.
        second: (B, D) unit vectors of its second views.
        all_first: (N, D) unit vectors, the first views of the global batch.
        all_second: (N, D).
        targets: (B,) int64, where this worker's rows lie among the N.
        temperature: divides cosines.

    Returns:
        () mean over the 2B anchors, in nats; log(2N - 1) at chance.

    Source: ConSERT, equation 1, arXiv:2105.11741; SimCLR. ConSERT's authors' code adds the means over either view's
    anchors, which is twice this.
    """

    def one_way(anchors: Tensor, others: Tensor, same: Tensor) -> Tensor:
        itself = F.one_hot(targets, len(same)).bool()
        alike = (anchors @ same.T / temperature).masked_fill(itself, -torch.inf)
        return F.cross_entropy(torch.cat([anchors @ others.T / temperature, alike], dim=1), targets)

    return (one_way(first, all_second, all_first) + one_way(second, all_first, all_second)) / 2


def masked_token_loss(logits: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
    """Cross-entropy of the masked tokens under a masked language model.

    Args:
        logits: (m, V) at this worker's masked places; m may be 0.
        tokens: (m,) int64, what stood there.
        count: () masked places of a worker on average, so that the mean over workers of what is returned is the
            mean over all masked places of the global batch; > 0.

    Returns:
        () nats a token; log V at chance.

    Source: l_MLM of WSSCSE, and BERT's objective.
    """
    return F.cross_entropy(logits, tokens, reduction="sum") / count


def hard_negative_info_nce(
    anchors: Tensor,
    candidates: Tensor,
    negatives: Tensor,
    targets: Tensor,
    temperature: float,
    negative_temperature: float,
    negative_weight: float = 1.0,
) -> Tensor:
    """Cross-entropy of finding each anchor's positive among all candidates and all hard negatives.

    Args:
        anchors: (B, D) unit vectors.
        candidates: (N, D) unit vectors.
        negatives: (M, D) unit vectors, each a hard negative of every anchor.
        targets: (B,) int64, the row of ``candidates`` that is anchor i's positive.
        temperature: divides the cosines to the candidates.
        negative_temperature: divides the cosines to the negatives; 1 is the paper's formula as printed.
        negative_weight: how often each hard negative counts; > 0.

    Returns:
        () mean over anchors, in nats.

    Source: APINCSE, equation 19; SimCSE, equation 5, with equal temperatures; ClusterNS, with a weight mu.
    """
    negative_logits = anchors @ negatives.T / negative_temperature + math.log(negative_weight)
    return F.cross_entropy(torch.cat([anchors @ candidates.T / temperature, negative_logits], dim=1), targets)


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


def angular_margin_info_nce(
    anchors: Tensor, candidates: Tensor, targets: Tensor, temperature: float, margin: float
) -> Tensor:
    """Like :func:`info_nce`, with the angle to an anchor's positive made larger by a margin.

    Args:
        anchors: (B, D) unit vectors.
        candidates: (N, D) unit vectors.
        targets: (B,) int64, the row of ``candidates`` that is anchor i's positive.
        temperature: divides cosines.
        margin: m in radians, 0 to pi / 2.

    Returns:
        () mean over anchors, in nats.

    Source: ArcCSE, section 3.2, ACL 2022. Where two views are equal the sine's slope has no bound, so the sine is
    held at 0.001, less than a tenth of a degree.
    """
    cosines = anchors @ candidates.T                                               # (B, N)
    positive = cosines.gather(1, targets[:, None])                                 # (B, 1)
    sine = (1 - positive**2).clamp(min=1e-6).sqrt()
    turned = positive * math.cos(margin) - sine * math.sin(margin)                 # cos(angle + m)
    return F.cross_entropy(cosines.scatter(1, targets[:, None], turned) / temperature, targets)


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


def ranking_loss(scores: Tensor, labels: Tensor, scale: float) -> Tensor:
    """log(1 + the sum, over all p, q with y_p > y_q, of exp(scale (s_q - s_p))).

    Each two pairs of different labels should have their scores in the order of the labels; equal labels ask nothing,
    so a batch of one label has a loss of 0 and no gradient.

    Args:
        scores: (P,) how alike the two sentences of each pair are, by the encoder.
        labels: (P,) how alike they are said to be; only their order counts.
        scale: 1 / temperature; > 0.

    Returns:
        () one loss for all pairs together: no mean over them.

    Source: CoSENT, IEEE/ACM TASLP 32 (2024), the loss of its section III.
    """
    differences = scale * (scores[None, :] - scores[:, None])                      # (P, P): s_q - s_p
    wanted = differences[labels[:, None] > labels[None, :]]
    return torch.cat([wanted.new_zeros(1), wanted]).logsumexp(dim=0)


def angle_scores(first: Tensor, second: Tensor) -> Tensor:
    """How small the angles between pairs of vectors are, when each vector is read as d/2 complex numbers.

    The first half of a vector is its real part, the second the imaginary one. The score is the absolute value of
    the summed parts of the quotient z/w, each brought to length one: 1 for equal vectors.

    Args:
        first: (P, D) vectors z, D even.
        second: (P, D) vectors w.

    Returns:
        (P,) in [0, sqrt 2]; large for like pairs.

    Source: AnglE, equations 5-8, arXiv:2309.12871. The paper's loss sums over differences of angles with the opposite
    sign; what its authors' code computes, and every implementation since, is a score that grows with likeness.
    """
    a, b = F.normalize(first, dim=-1).chunk(2, dim=-1)
    c, d = F.normalize(second, dim=-1).chunk(2, dim=-1)
    real = (a * c + b * d).sum(dim=-1)
    imaginary = (b * c - a * d).sum(dim=-1)
    return (real + imaginary).abs()


def in_batch_loss(first: Tensor, second: Tensor, text_ids: Tensor, alike: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding, among all sentences of the batch, the other half of a pair that is alike.

    Where the batch has that other half more than once, each copy counts as a positive. Sentences of other pairs have
    no positive and no loss of their own, but everyone meets them as negatives.

    Args:
        first: (P, D) unit vectors of the pairs' first sentences.
        second: (P, D) unit vectors of their second ones.
        text_ids: (2P,) int64, equal for equal sentences; those of ``first`` come first.
        alike: (P,) bool, which pairs are.
        temperature: divides cosines.

    Returns:
        () mean over all 2P sentences, in nats.

    Source: AnglE, equation 4, arXiv:2309.12871.
    """
    vectors = torch.cat([first, second])                                           # (2P, D)
    itself = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    other_half = text_ids.roll(len(first))                                         # (2P,)
    positive = (other_half[:, None] == text_ids[None, :]) & alike.repeat(2)[:, None] & ~itself
    logits = (vectors @ vectors.T / temperature).masked_fill(itself, -torch.inf)
    return -logits.log_softmax(dim=1).masked_fill(~positive, 0.0).sum(dim=1).mean()


def difference_features(first: Tensor, second: Tensor) -> Tensor:
    """(P, D) and (P, D) -> (P, 3D): [u; v; |u - v|].

    Source: SBERT, section 3, the classification objective, arXiv:1908.10084.
    """
    return torch.cat([first, second, (first - second).abs()], dim=-1)


def manhattan_similarity(first: Tensor, second: Tensor) -> Tensor:
    """exp(-mean_k |u_k - v_k|) of each pair.

    Args:
        first: (P, D) vectors, not normalised.
        second: (P, D).

    Returns:
        (P,) in (0, 1]; 1 for equal vectors. The mean over dimensions, where Ma-LSTM has the sum, keeps it from 0.

    Source: Siamese recurrent architectures, Mueller and Thyagarajan, AAAI 2016, with BERT in the LSTM's place.
    """
    return (-(first - second).abs().mean(dim=-1)).exp()


def bidirectional_margins(
    anchors: Tensor, positives: Tensor, negatives: Tensor, least: float, greatest: float
) -> Tensor:
    """How far each soft negative is from being less alike than the positive by a margin within bounds.

    With d the negative's cosine less the positive's: max(0, d + least) + max(0, -d - greatest).

    Args:
        anchors: (B, D) unit vectors.
        positives: (B, D) unit vectors.
        negatives: (B, D) unit vectors of the soft negatives.
        least: alpha, the smallest margin without a loss.
        greatest: beta, the largest.

    Returns:
        (B,) at least 0.

    Source: SNCSE, the bidirectional margin loss of section 3, arXiv:2201.05979.
    """
    return outside_margins((anchors * negatives).sum(dim=-1) - (anchors * positives).sum(dim=-1), least, greatest)


def outside_margins(differences: Tensor, least: float, greatest: float) -> Tensor:
    """max(0, d + least) + max(0, -d - greatest) of each difference d in cosine, negative less positive."""
    return F.relu(differences + least) + F.relu(-differences - greatest)


def replaced_token_losses(logits: Tensor, replaced: Tensor) -> Tensor:
    """What each token costs a discriminator that tells replaced tokens from original ones.

    Args:
        logits: (B, S) higher where the discriminator holds a token for replaced.
        replaced: (B, S) bool, which are.

    Returns:
        (B, S) binary cross-entropies in nats.

    Source: DiffCSE, section 3, the loss L_RTD, arXiv:2204.10298.
    """
    return F.binary_cross_entropy_with_logits(logits, replaced.to(logits.dtype), reduction="none")


def self_guided_loss(anchors: Tensor, candidates: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding each of an anchor's K layers, on its own, among all layers of other sentences.

    An anchor's other layers are no negatives of the one that is sought.

    Args:
        anchors: (B, D) unit vectors.
        candidates: (N, K, D) unit vectors of K layers.
        targets: (B,) int64, the row of ``candidates`` that is anchor i's sentence.
        temperature: divides cosines.

    Returns:
        () mean over anchors and layers, in nats.

    Source: SG-OPT, L^opt3 in section 3.3, arXiv:2106.07345.
    """
    cosines = torch.einsum("bd,nkd->bnk", anchors, candidates) / temperature
    b, n, _ = cosines.shape
    positives = cosines[torch.arange(b, device=targets.device), targets]           # (B, K)
    own = targets[:, None] == torch.arange(n, device=targets.device)               # (B, N)
    negatives = cosines.masked_fill(own[:, :, None], -torch.inf).flatten(1)        # (B, N * K)
    return F.softplus(negatives.logsumexp(dim=1, keepdim=True) - positives).mean()
