"""What the methods compute, as loops in float64 straight from their equations."""

import math
from collections.abc import Sequence

import numpy as np

Vector = np.ndarray
Rows = Sequence[np.ndarray]


def unit(vector: Vector) -> Vector:
    """The vector divided by its length."""
    return vector / math.sqrt(sum(float(x) ** 2 for x in vector))


def cosine(a: Vector, b: Vector) -> float:
    return float(unit(a) @ unit(b))


def cross_entropy(logits: Sequence[float], target: int) -> float:
    """-log of the softmax's share of the target."""
    greatest = max(logits)
    return greatest + math.log(sum(math.exp(logit - greatest) for logit in logits)) - logits[target]


def softmax(logits: Sequence[float]) -> list[float]:
    total = sum(math.exp(logit - max(logits)) for logit in logits)
    return [math.exp(logit - max(logits)) / total for logit in logits]


def info_nce(anchors: Rows, candidates: Rows, targets: Sequence[int], temperature: float) -> float:
    """APINCSE (8) and (15); SimCSE (1)."""
    losses = []
    for anchor, target in zip(anchors, targets, strict=True):
        logits = [cosine(anchor, candidate) / temperature for candidate in candidates]
        losses.append(cross_entropy(logits, target))
    return sum(losses) / len(losses)


def hard_negative_info_nce(
    anchors: Rows,
    candidates: Rows,
    negatives: Rows,
    targets: Sequence[int],
    temperature: float,
    negative_temperature: float,
    own: bool = False,
) -> float:
    """APINCSE (19), against all hard negatives of the batch or an anchor's own."""
    losses = []
    for i, (anchor, target) in enumerate(zip(anchors, targets, strict=True)):
        met = [negatives[i]] if own else negatives
        logits = [cosine(anchor, candidate) / temperature for candidate in candidates]
        logits += [cosine(anchor, negative) / negative_temperature for negative in met]
        losses.append(cross_entropy(logits, target))
    return sum(losses) / len(losses)


def nearest(query: Vector, rows: Rows, k: int, excluded: int | None) -> list[Vector]:
    """APINCSE (10-12): the k rows with the highest cosine, the most similar first."""
    others = [row for at, row in enumerate(rows) if at != excluded]
    return sorted(others, key=lambda row: -cosine(query, row))[:k]


def augmented_positive(positive: Vector, neighbours: Rows, beta: float) -> Vector:
    """APINCSE (13-14): the softmax-weighted mean of a positive and its neighbours."""
    stacked = [positive, *neighbours]
    weights = softmax([float(positive @ row) / beta for row in stacked])
    return sum(weight * row for weight, row in zip(weights, stacked, strict=True))


def nearest_layer(cls: Rows) -> int:
    """APINCSE (16-17): of [CLS] in layers 0..T, the one of 1..T-1 most similar to the last."""
    return max(range(1, len(cls) - 1), key=lambda layer: cosine(cls[layer], cls[-1]))


def layer_attention(weights: dict[str, np.ndarray], cls: Rows, means: Rows, queries: str, rsn: str) -> Vector:
    """APINCSE (2-7) of one sentence: [CLS] and mean vectors of layers 0..T -> (d,)."""
    depth = len(cls) - 1
    d = len(cls[0])
    outputs = []
    for i in range(1, depth + 1):
        query = weights["query.weight"] @ cls[i]
        scores = [float(query @ (weights["key.weight"] @ means[j])) / math.sqrt(d) for j in range(1, depth + 1)]
        attention = softmax(scores)
        outputs.append(sum(attention[j - 1] * (weights["value.weight"] @ means[j]) for j in range(1, depth + 1)))
    pooled = sum(outputs) if queries == "sum" else sum(outputs) / depth
    both = np.concatenate([cls[depth], pooled])
    passed = {
        "top_tanh": outputs[-1],
        "layers_tanh": sum(outputs) / depth,
        "cls_tanh": cls[depth],
        "both_tanh": cls[depth] + sum(outputs) / depth,
    }
    if rsn == "proj_tanh":
        passed["proj_tanh"] = weights["projection.weight"] @ both
    return passed[rsn] + np.tanh(weights["residual.weight"] @ both + weights["residual.bias"])


class APINCSE:
    """The whole loss, with a list as its queue.

    Attributes:
        queue: (place pushed at, unit vector), the oldest first.
    """

    def __init__(self, **options: object) -> None:
        self.options = options
        self.queue: list[tuple[int, Vector]] = []
        self.pushed = 0

    def loss(
        self, anchors: Rows, positives: Rows, cls: Rows, pushed: Rows | None = None
    ) -> tuple[float, dict[str, float]]:
        """One step.

        Args:
            anchors: N embeddings of the first view.
            positives: N embeddings of the second view.
            cls: for each sentence, the [CLS] vectors of the first view in layers 0..T.
            pushed: what enters the queue in place of the positives, which are constants there to a derivative.

        Returns:
            Equation 20, and the parts of it that are computed.
        """
        o = self.options
        own = range(len(anchors))
        parts = {"loss_instance": info_nce(anchors, positives, own, o["temperature"])}
        total = o["instance_weight"] * parts["loss_instance"]
        if o["augmented_weight"] > 0:
            for positive in positives if pushed is None else pushed:
                self.queue.append((self.pushed, unit(positive)))
                self.pushed += 1
            self.queue = self.queue[-o["queue_length"] :]
            if self.pushed >= o["queue_length"] or o["queue_warmup"] == "none":
                parts["loss_augmented"] = info_nce(
                    anchors, [self._augmented(positives, i) for i in own], own, o["temperature"]
                )
                total += o["augmented_weight"] * parts["loss_augmented"]
        if o["negative_weight"] > 0:
            wanted = o["negative_layer"]
            chosen = [nearest_layer(layers) if wanted == "argmax" else wanted for layers in cls]
            parts["loss_negative"] = hard_negative_info_nce(
                anchors,
                positives,
                [layers[layer] for layers, layer in zip(cls, chosen, strict=True)],
                own,
                o["temperature"],
                o["temperature"] if o["negative_temperature"] else 1.0,
                own=o["negatives"] == "own",
            )
            total += o["negative_weight"] * parts["loss_negative"]
        return total, parts

    def _augmented(self, positives: Rows, i: int) -> Vector:
        o = self.options
        copy = self.pushed - len(positives) + i
        rows = [row for pushed_at, row in self.queue if o["include_self"] or pushed_at != copy]
        live = unit(positives[i]) if o["anchor_norm"] == "unit" else positives[i]
        return augmented_positive(live, nearest(positives[i], rows, o["neighbours"], None), o["beta"])


def ranking(scores: Sequence[float], labels: Sequence[float], scale: float) -> float:
    """CoSENT: log(1 + sum over y_p > y_q of exp(scale (s_q - s_p)))."""
    total = 1.0
    for p, label in enumerate(labels):
        for q, other in enumerate(labels):
            if label > other:
                total += math.exp(scale * (scores[q] - scores[p]))
    return math.log(total)


def angle_score(first: Vector, second: Vector) -> float:
    """AnglE (5-8): the summed real and imaginary parts of z/w, over |z|/|w|, as complex numbers say it."""
    half = len(first) // 2
    z, w = first[:half] + 1j * first[half:], second[:half] + 1j * second[half:]
    total = 0.0
    for one, other in zip(z, w, strict=True):
        product = one * other.conjugate()                      # z/w = z w* / |w|^2, and |w|^2 |z|/|w| = |z| |w|
        total += product.real + product.imag
    return abs(total) / (float(np.linalg.norm(first)) * float(np.linalg.norm(second)))


def in_batch(first: Rows, second: Rows, texts: Sequence[object], labels: Sequence[float], temperature: float) -> float:
    """AnglE (4) over all 2P sentences; copies of a sentence's other half are positives of it, too."""
    vectors, n = [*first, *second], len(first)
    losses = []
    for i, vector in enumerate(vectors):
        others = [j for j in range(2 * n) if j != i]
        logits = [cosine(vector, vectors[j]) / temperature for j in others]
        half = texts[(i + n) % (2 * n)]
        alike = labels[i % n] == 1
        losses.append(sum(cross_entropy(logits, at) for at, j in enumerate(others) if alike and texts[j] == half))
    return sum(losses) / len(losses)


def bidirectional_margin(anchor: Vector, positive: Vector, negative: Vector, alpha: float, beta: float) -> float:
    """SNCSE: the loss of a soft negative whose cosine is not within [-beta, -alpha] of the positive's."""
    difference = cosine(anchor, negative) - cosine(anchor, positive)
    return max(0.0, difference + alpha) + max(0.0, -difference - beta)


def replaced_tokens(chances: Rows, written: Rows, read: Rows) -> float:
    """DiffCSE's L_RTD: chances that each token was not replaced, the tokens as written and as the generator left them.

    A mean over all tokens of all sentences, where the paper's sum over them would weigh more in longer batches.
    """
    losses = []
    for chance, original, edited in zip(chances, written, read, strict=True):
        for at in range(len(original)):
            losses.append(-math.log(chance[at] if original[at] == edited[at] else 1 - chance[at]))
    return sum(losses) / len(losses)


def self_guided(anchors: Rows, layers: Sequence[Rows], temperature: float) -> float:
    """SG-OPT's L^opt3: for each anchor its own sentence's vector of each layer, against all layers of the others."""
    losses = []
    for i, anchor in enumerate(anchors):
        others = [vector for m, vectors in enumerate(layers) if m != i for vector in vectors]
        for own in layers[i]:
            losses.append(cross_entropy([cosine(anchor, x) / temperature for x in (own, *others)], 0))
    return sum(losses) / len(losses)


def repeated(tokens: Sequence[int], places: Sequence[int]) -> list[int]:
    """ESimCSE: the tokens, those at the places twice."""
    return [token for at, token in enumerate(tokens) for _ in range(2 if at in places else 1)]


def wsscse(first: Rows, second: Rows, weak: Rows, masks: Sequence[tuple[Vector, int]], weight: float) -> float:
    """WSSCSE: l_CON + lambda l_WSS + l_MLM; ``masks`` has the logits and the token of each masked place."""
    own = range(len(first))
    total = info_nce(first, second, own, 0.05) + weight * info_nce(first, weak, own, 0.05)
    if masks:
        total += sum(cross_entropy(logits.tolist(), token) for logits, token in masks) / len(masks)
    return total


class ESimCSE:
    """The whole loss, with a list as its queue of momentum embeddings."""

    def __init__(self, queue_length: int, momentum: float, weights: dict[str, np.ndarray]) -> None:
        self.queue_length, self.momentum = queue_length, momentum
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.queue: list[Vector] = []

    def loss(self, anchors: Rows, positives: Rows) -> float:
        """Equation 6: every anchor meets its batch's positives and the whole queue."""
        return info_nce(anchors, [*positives, *self.queue], range(len(anchors)), 0.05)

    def update(self, weights: dict[str, np.ndarray]) -> None:
        """Equation 5."""
        for name, value in weights.items():
            self.weights[name] = self.momentum * self.weights[name] + (1 - self.momentum) * value

    def push(self, embeddings: Rows) -> None:
        """The oldest leave."""
        self.queue = [*self.queue, *embeddings][-self.queue_length :]


def nt_xent(first: Rows, second: Rows, temperature: float) -> float:
    """ConSERT (1): each of the 2N views finds its sentence's other view among the 2N - 1 others."""
    views, n = [*first, *second], len(first)
    losses = []
    for i, anchor in enumerate(views):
        others = [j for j in range(2 * n) if j != i]
        logits = [cosine(anchor, views[j]) / temperature for j in others]
        losses.append(cross_entropy(logits, others.index((i + n) % (2 * n))))
    return sum(losses) / len(losses)


def angular_margin_info_nce(
    anchors: Rows, candidates: Rows, targets: Sequence[int], temperature: float, degrees: float
) -> float:
    """ArcCSE: the positive's angle is larger by a margin."""
    losses = []
    for anchor, target in zip(anchors, targets, strict=True):
        angles = [math.acos(max(-1.0, min(1.0, cosine(anchor, candidate)))) for candidate in candidates]
        angles[target] += math.radians(degrees)
        losses.append(cross_entropy([math.cos(angle) / temperature for angle in angles], target))
    return sum(losses) / len(losses)


class ClusterNS:
    """The whole loss, with a list of centroids."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.centroids: list[Vector] = []

    def loss(self, anchors: Rows, positives: Rows) -> tuple[float, dict[str, float]]:
        """One step with N embeddings of each view: the loss, and its parts once there are clusters."""
        o, n = self.options, len(anchors)
        cosines = [[cosine(anchor, positive) for positive in positives] for anchor in anchors]
        if not self.centroids:
            if sum(map(sum, cosines)) / n**2 <= o["start_cosine"]:
                self._scatter(anchors, cosines)
            return info_nce(anchors, positives, range(n), o["temperature"]), {}
        self._move(anchors)
        ranked = [self._ranked(anchor) for anchor in anchors]
        negatives = [self.centroids[order[1]] for order in ranked]
        contrast, margin = 0.0, 0.0
        for i, anchor in enumerate(anchors):
            logits = [value / o["temperature"] for value in cosines[i]]
            if o["negative_weight"] > 0:
                own = math.log(o["negative_weight"])
                logits += [cosine(anchor, negative) / o["temperature"] + own for negative in negatives]
            contrast += cross_entropy(logits, i) / n
            for j in range(n):
                if j != i and ranked[i][0] == ranked[j][0]:
                    difference = cosines[i][j] - cosines[i][i]
                    margin += (max(0.0, difference + o["alpha"]) + max(0.0, -difference - o["beta"])) / n**2
        return contrast + o["margin_weight"] * margin, {"loss_contrast": contrast, "loss_margin": margin}

    def _ranked(self, point: Vector) -> list[int]:
        return sorted(range(len(self.centroids)), key=lambda at: -cosine(point, self.centroids[at]))

    def _scatter(self, anchors: Rows, cosines: Sequence[Sequence[float]]) -> None:
        chosen = [0]
        while len(chosen) < self.options["clusters"]:
            others = [at for at in range(len(anchors)) if at not in chosen]
            chosen.append(min(others, key=lambda at: cosines[chosen[-1]][at]))
        self.centroids = [anchors[at] for at in chosen]

    def _move(self, anchors: Rows) -> None:
        clusters = [self._ranked(anchor)[0] for anchor in anchors]
        gamma = self.options["momentum"]
        for at in set(clusters):
            total = sum(anchor for anchor, cluster in zip(anchors, clusters, strict=True) if cluster == at)
            self.centroids[at] = (1 - gamma) * self.centroids[at] + gamma * total


def jensen_shannon(first: Sequence[float], second: Sequence[float]) -> float:
    """RankCSE: of the softmaxes of two lists of logits."""
    total = 0.0
    for p, q in zip(softmax(first), softmax(second), strict=True):
        total += (p * math.log(2 * p / (p + q)) + q * math.log(2 * q / (p + q))) / 2
    return total


def listnet(student: Sequence[float], teacher: Sequence[float]) -> float:
    """RankCSE: the cross-entropy of the softmaxes of two lists of logits."""
    chances = zip(softmax(teacher), softmax(student), strict=True)
    return -sum(wanted * math.log(given) for wanted, given in chances)


def listmle(student: Sequence[float], teacher: Sequence[float]) -> float:
    """RankCSE: -log of drawing places in the teacher's order, each out of those that remain."""
    left = sorted(range(len(teacher)), key=lambda at: -teacher[at])
    total = 0.0
    while left:
        total += cross_entropy([student[at] for at in left], 0)
        left = left[1:]
    return total
