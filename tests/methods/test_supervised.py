"""Losses of labelled pairs and triplets: against loops, against sentence-transformers, and over several workers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn

from cluster.errors import InputError
from cluster.world import Solo, World
from stages.methods import functional
from stages.methods.base import Batch, Method
from stages.methods.registry import LABELLED, METHODS, TRIPLETS, MethodConfig, check_kind
from tests import oracles, tiny
from tests.processes import in_processes

LABELS = [1.0, 0.2, 0.6, 0.6, 0.0, 1.0]
TEXT_IDS = [0, 1, 2, 0, 4, 5, 6, 7, 6, 9, 10, 6]               # 0 twice among the first, 6 thrice among the second


def vectors(*shape: int, seed: int = 0) -> Tensor:
    """Random float64."""
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


@pytest.fixture
def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Six pairs of 8 numbers, and their labels."""
    return vectors(6, 8), vectors(6, 8, seed=1), torch.tensor(LABELS, dtype=torch.float64)


Pairs = tuple[Tensor, Tensor, Tensor]


def test_the_ranking_loss_is_the_papers_sum(pairs: Pairs) -> None:
    scores, labels = vectors(6), pairs[2]
    for scale in (1.0, 20.0):
        found = functional.ranking_loss(scores, labels, scale)
        assert found.item() == pytest.approx(oracles.ranking(scores.tolist(), labels.tolist(), scale), rel=1e-12)


def test_only_the_order_of_labels_counts(pairs: Pairs) -> None:
    scores, labels = vectors(6), pairs[2]
    found = functional.ranking_loss(scores, labels, 20.0)
    assert functional.ranking_loss(scores, 5 * labels**3 - 1, 20.0) == found


def test_the_angle_score_is_that_of_complex_numbers(pairs: Pairs) -> None:
    first, second, _ = pairs
    found = functional.angle_scores(first, second)
    wanted = [oracles.angle_score(z, w) for z, w in zip(first.numpy(), second.numpy(), strict=True)]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


def test_the_angle_score_of_equal_vectors_is_one_and_lengths_do_not_matter(pairs: Pairs) -> None:
    first, second, _ = pairs
    np.testing.assert_allclose(functional.angle_scores(first, 3 * first).numpy(), 1.0, rtol=1e-12)
    torch.testing.assert_close(functional.angle_scores(7 * first, second), functional.angle_scores(first, second))


def test_the_in_batch_loss_is_the_papers_sum_with_copies_as_positives(pairs: Pairs) -> None:
    first, second = (F.normalize(side, dim=-1) for side in pairs[:2])
    for text_ids in (TEXT_IDS, list(range(12))):
        found = functional.in_batch_loss(first, second, torch.tensor(text_ids), pairs[2] == 1, 0.05)
        wanted = oracles.in_batch(first.numpy(), second.numpy(), text_ids, LABELS, 0.05)
        assert found.item() == pytest.approx(wanted, rel=1e-12)


def test_without_copies_the_in_batch_loss_is_a_contrast_of_the_pairs_that_are_alike(pairs: Pairs) -> None:
    """As a cross-entropy of torch over the rows of those sentences alone."""
    first, second = (F.normalize(side, dim=-1) for side in pairs[:2])
    both = torch.cat([first, second])
    logits = (both @ both.T / 0.05).fill_diagonal_(-torch.inf)
    alike = (pairs[2] == 1).repeat(2)
    wanted = F.cross_entropy(logits[alike], torch.arange(12).roll(6)[alike], reduction="sum") / 12
    found = functional.in_batch_loss(first, second, torch.arange(12), pairs[2] == 1, 0.05)
    torch.testing.assert_close(found, wanted)


def test_the_manhattan_similarity_is_a_mean_over_dimensions(pairs: Pairs) -> None:
    first, second, _ = pairs
    wanted = np.exp(-np.abs(first.numpy() - second.numpy()).sum(axis=1) / 8)
    np.testing.assert_allclose(functional.manhattan_similarity(first, second).numpy(), wanted, rtol=1e-12)
    assert functional.manhattan_similarity(first, first).tolist() == [1.0] * 6


class Answers(nn.Module):
    """Stands where sentence-transformers expects a model: it returns the embeddings that it is given."""

    device = torch.device("cpu")

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["embedding"]}


def as_features(*sides: Tensor) -> list[dict[str, Tensor]]:
    return [{"embedding": side} for side in sides]


def test_cosent_is_that_of_sentence_transformers(pairs: Pairs) -> None:
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    first, second, labels = pairs
    wanted = CoSENTLoss(Answers(), scale=20.0)(as_features(first, second), labels)
    found = functional.ranking_loss(F.cosine_similarity(first, second), labels, 20.0)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_angle_loss_is_that_of_sentence_transformers(pairs: Pairs) -> None:
    from sentence_transformers.sentence_transformer.losses import AnglELoss

    first, second, labels = pairs
    wanted = AnglELoss(Answers(), scale=1.0)(as_features(first, second), labels)
    found = functional.ranking_loss(functional.angle_scores(first, second), labels, 1.0)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_loss_of_triplets_is_that_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    sides = [vectors(6, 8, seed=seed) for seed in range(3)]
    wanted = MultipleNegativesRankingLoss(Answers(), scale=20.0)(as_features(*sides), torch.empty(0))
    units = [F.normalize(side, dim=-1) for side in sides]
    found = functional.hard_negative_info_nce(*units, torch.arange(6), 0.05, 0.05)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_classifier_of_sbert_is_that_of_sentence_transformers(pairs: Pairs) -> None:
    from sentence_transformers.sentence_transformer.losses import SoftmaxLoss

    first, second, _ = pairs
    peer = SoftmaxLoss(Answers(), embedding_dimension=8, num_labels=6).double()
    classes = torch.tensor([5, 1, 3, 3, 0, 5])
    wanted = peer(as_features(first, second), classes)
    logits = peer.classifier(functional.difference_features(first, second))
    assert F.cross_entropy(logits, classes).item() == pytest.approx(wanted.item(), rel=1e-6)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosent": lambda u, v: functional.ranking_loss(F.cosine_similarity(u, v), torch.tensor(LABELS), 2.0),
    "angle": lambda u, v: functional.ranking_loss(functional.angle_scores(u, v), torch.tensor(LABELS), 1.0),
    "in batch": lambda u, v: functional.in_batch_loss(u, v, torch.tensor(TEXT_IDS), torch.tensor(LABELS) == 1, 0.5),
    "manhattan": lambda u, v: functional.manhattan_similarity(u, v),
    "difference": lambda u, v: functional.difference_features(u, v),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_finite_differences(loss: str) -> None:
    sides = vectors(6, 4).requires_grad_(), vectors(6, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[loss], sides)


def test_labels_that_are_all_equal_give_no_loss_and_no_gradient() -> None:
    scores = vectors(5).requires_grad_()
    loss = functional.ranking_loss(scores, torch.full((5,), 0.4), 20.0)
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert scores.grad.tolist() == [0.0] * 5


def test_a_batch_without_pairs_that_are_alike_has_no_in_batch_loss_and_no_gradient() -> None:
    sides = vectors(5, 4).requires_grad_(), vectors(5, 4, seed=1).requires_grad_()
    loss = functional.in_batch_loss(*sides, torch.arange(10), torch.zeros(5, dtype=torch.bool), 0.05)
    loss.backward()
    assert loss.item() == 0
    assert [side.grad.abs().max().item() for side in sides] == [0.0, 0.0]  # type: ignore[union-attr]


def method(name: str, pooling: str = "mean", **options: Any) -> Method:
    built: Method = TypeAdapter(MethodConfig).validate_python({"name": name, **options}).build(
        tiny.encoder(pooling, dropout=0.0)  # type: ignore[arg-type]
    )
    return built


def batch_for(name: str, rows: int = 6) -> Batch:
    """Six pairs with labels and copies, or six triplets."""
    if LABELLED[name] == TRIPLETS:
        plain = tiny.batch(3 * rows, seed=0)
        return Batch(plain.input_ids, plain.attention_mask, None, torch.arange(3 * rows))
    plain = tiny.batch(2 * rows, seed=0)
    places = torch.tensor(TEXT_IDS)                            # equal numbers must be equal sentences
    return Batch(plain.input_ids[places], plain.attention_mask[places], torch.tensor(LABELS), places)


def share(batch: Batch, world: World, members: int) -> Batch:
    """This worker's rows of every member."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.reshape(members, world.size, -1, *tensor.shape[1:])[:, world.rank].flatten(0, 1)

    labels = None if batch.labels is None else batch.labels.reshape(world.size, -1)[world.rank]
    assert batch.text_ids is not None
    return Batch(own(batch.input_ids), own(batch.attention_mask), labels, own(batch.text_ids))


def embeddings_of(learner: Method, batch: Batch) -> list[np.ndarray]:
    """(n, D) of each member."""
    with torch.no_grad():
        found = learner.encoder(batch.input_ids, batch.attention_mask).embedding.double().numpy()
    members = 2 if batch.labels is not None else 3
    return np.split(found, members)


def test_cosent_ranks_cosines() -> None:
    learner, batch = method("cosent", scale=5.0), batch_for("cosent")
    first, second = embeddings_of(learner, batch)
    cosines = [oracles.cosine(u, v) for u, v in zip(first, second, strict=True)]
    loss, metrics = learner(batch, Solo())
    assert loss.item() == pytest.approx(oracles.ranking(cosines, LABELS, 5.0), rel=2e-5)
    assert metrics["batches_without_order"] == 0


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 0, 2)], ids=str)
def test_angle_is_the_weighted_sum_of_its_parts(weights: tuple[float, float, float]) -> None:
    names = ("cosine_weight", "in_batch_weight", "angle_weight")
    learner, batch = method("angle", **dict(zip(names, weights, strict=True))), batch_for("angle")
    first, second = embeddings_of(learner, batch)
    together = list(zip(first, second, strict=True))
    parts = {
        "loss_cosine": oracles.ranking([oracles.cosine(u, v) for u, v in together], LABELS, 20.0),
        "loss_in_batch": oracles.in_batch(first, second, TEXT_IDS, LABELS, 0.05),
        "loss_angle": oracles.ranking([oracles.angle_score(u, v) for u, v in together], LABELS, 1.0),
    }
    loss, metrics = learner(batch, Solo())
    wanted = sum(weight * part for weight, part in zip(weights, parts.values(), strict=True))
    assert loss.item() == pytest.approx(wanted, rel=2e-5)
    used = {name: part for (name, part), weight in zip(parts.items(), weights, strict=True) if weight}
    assert {name: metrics[name].item() for name in metrics if name.startswith("loss_")} == pytest.approx(used, rel=2e-5)


def test_sbert_classifies_pairs_by_steps_of_their_labels() -> None:
    learner, batch = method("sbert", classes=6), batch_for("sbert")
    first, second = embeddings_of(learner, batch)
    weight, bias = (parameter.detach().double().numpy() for parameter in learner.classifier.parameters())  # type: ignore[operator]
    losses = []
    for u, v, wanted in zip(first, second, (5, 1, 3, 3, 0, 5), strict=True):
        logits = weight @ np.concatenate([u, v, np.abs(u - v)]) + bias
        losses.append(oracles.cross_entropy(logits.tolist(), wanted))
    assert learner(batch, Solo())[0].item() == pytest.approx(np.mean(losses), rel=2e-5)
    assert not any("classifier" in name for name in learner.encoder.state_dict())


def test_siamese_squares_the_errors_of_the_similarity() -> None:
    learner, batch = method("siamese"), batch_for("siamese")
    first, second = embeddings_of(learner, batch)
    errors = [
        np.exp(-np.mean(np.abs(u - v))) - label for u, v, label in zip(first, second, LABELS, strict=True)
    ]
    assert learner(batch, Solo())[0].item() == pytest.approx(np.mean(np.square(errors)), rel=2e-5)


@pytest.mark.parametrize("mlp", ["none", "train-only"])
def test_supervised_simcse_is_equation_5(mlp: str) -> None:
    learner, batch = method("simcse-supervised", mlp=mlp), batch_for("simcse-supervised")
    sides = embeddings_of(learner, batch)
    if mlp == "train-only":
        dense = learner.mlp.dense                              # type: ignore[union-attr]
        weight, bias = (parameter.detach().double().numpy() for parameter in dense.parameters())  # type: ignore[operator, union-attr]
        sides = [np.tanh(side @ weight.T + bias) for side in sides]
    wanted = oracles.hard_negative_info_nce(*sides, range(6), 0.05, 0.05)
    assert learner(batch, Solo())[0].item() == pytest.approx(wanted, rel=2e-5)


def gradients(world: World, name: str, options: dict[str, Any]) -> tuple[float, list[np.ndarray]]:
    """Loss and gradients of the global batch, averaged over workers as an engine does."""
    torch.manual_seed(1)
    learner, batch = method(name, **options), batch_for(name)
    loss, _ = learner(share(batch, world, 2 if batch.labels is not None else 3), world)
    loss.backward()
    found = [world.mean(parameter.grad).numpy() for parameter in learner.parameters() if parameter.grad is not None]
    return world.mean(loss.detach()).item(), found


def of_all(world: World) -> list[tuple[float, list[np.ndarray]]]:
    return [gradients(world, name, {"classes": 6} if name == "sbert" else {}) for name in LABELLED]


@pytest.mark.cluster
def test_two_workers_have_the_loss_and_gradients_of_one() -> None:
    (alone,), (together, other) = in_processes(1, of_all), in_processes(2, of_all)
    for name, wanted, found, others in zip(LABELLED, alone, together, other, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5), name
        assert found[0] == others[0]
        for one, two in zip(wanted[1], found[1], strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(one).max()), err_msg=name)


@pytest.mark.parametrize("name", LABELLED)
def test_every_parameter_takes_part_in_the_loss(name: str) -> None:
    learner = method(name, "layer-attention")
    learner(batch_for(name), Solo())[0].backward()
    assert [name for name, parameter in learner.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", ["cosent", "angle"])
def test_a_batch_of_one_label_is_counted_and_teaches_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    learner, batch = method(name), batch_for(name)
    level = Batch(batch.input_ids, batch.attention_mask, torch.full((6,), 0.4), batch.text_ids)
    for times in (1, 2):
        loss, metrics = learner(level, Solo())
        assert (loss.item(), metrics["batches_without_order"].item()) == (0.0, times)
    loss.backward()
    assert all(not parameter.grad.any() for parameter in learner.parameters())     # type: ignore[union-attr]
    assert [record.message[:30] for record in caplog.records] == ["a batch has equal labels only,"]
    again = method(name)
    again.load_resume_state(learner.resume_state())
    assert again(level, Solo())[1]["batches_without_order"] == 3


def test_identical_sentences_in_a_pair_give_finite_gradients() -> None:
    plain = tiny.batch(6, seed=0)
    same = Batch(plain.input_ids.repeat(2, 1), plain.attention_mask.repeat(2, 1), torch.tensor(LABELS),
                 torch.arange(6).repeat(2))                    # fmt: skip
    for name in ("cosent", "angle", "sbert", "siamese"):
        learner = method(name)
        loss, _ = learner(same, Solo())
        loss.backward()
        assert torch.isfinite(loss)
        for parameter in learner.parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


SENTENCES = ", ".join(name for name in METHODS if name not in LABELLED)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("simcse", "scored-pairs",
         "train.method.name=simcse learns from sentences, not from corpus.kind=scored-pairs; set corpus.kind=sentences "
         "with such data, or a method that takes scored-pairs: cosent, angle, sbert, siamese"),
        ("cosent", "sentences",
         "train.method.name=cosent learns from scored-pairs or binary-pairs, not from corpus.kind=sentences; set "
         f"corpus.kind=scored-pairs with such data, or a method that takes sentences: {SENTENCES}"),
        ("simcse-supervised", "binary-pairs",
         "train.method.name=simcse-supervised learns from triplets or nli, not from corpus.kind=binary-pairs; set "
         "corpus.kind=triplets with such data, or a method that takes binary-pairs: cosent, angle, sbert, siamese"),
    ],
)  # fmt: skip
def test_data_that_a_method_cannot_learn_from_are_refused(name: str, kind: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        check_kind(name, kind)
    assert str(error.value) == message


def test_a_single_pair_a_batch_and_a_loss_of_no_part_are_refused() -> None:
    adapter = TypeAdapter(MethodConfig)
    with pytest.raises(InputError, match=r"train\.batch_size=1 has no two pairs"):
        adapter.validate_python({"name": "cosent"}).check(4, 1)
    nothing = {"name": "angle", "cosine_weight": 0, "in_batch_weight": 0, "angle_weight": 0}
    with pytest.raises(InputError, match="are all 0; set one of them higher"):
        adapter.validate_python(nothing).check(4, 8)
