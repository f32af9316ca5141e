"""The pure losses against loops, and their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.methods import functional
from tests import oracles


def vectors(*shape: int, seed: int = 0, unit: bool = True) -> Tensor:
    """Random float64."""
    made = torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))
    return F.normalize(made, dim=-1) if unit else made


def test_info_nce_is_the_papers_sum() -> None:
    anchors, candidates, targets = vectors(4, 5), vectors(9, 5), torch.tensor([3, 0, 8, 3])
    found = functional.info_nce(anchors, candidates, targets, 0.05)
    wanted = oracles.info_nce(anchors.numpy(), candidates.numpy(), targets.tolist(), 0.05)
    assert found.item() == pytest.approx(wanted, rel=1e-12)


def test_info_nce_of_candidates_that_are_all_alike_is_chance() -> None:
    alike = vectors(1, 5).expand(7, 5)
    assert functional.info_nce(alike[:3], alike, torch.arange(3), 0.05).item() == pytest.approx(math.log(7))


@pytest.mark.parametrize("negative_temperature", [0.05, 1.0])
def test_hard_negatives_of_the_whole_batch_stand_beside_every_anchors_candidates(negative_temperature: float) -> None:
    anchors, candidates, negatives, targets = vectors(4, 5), vectors(8, 5), vectors(6, 5), torch.tensor([4, 5, 6, 7])
    found = functional.hard_negative_info_nce(anchors, candidates, negatives, targets, 0.05, negative_temperature)
    wanted = oracles.hard_negative_info_nce(
        anchors.numpy(), candidates.numpy(), negatives.numpy(), targets.tolist(), 0.05, negative_temperature
    )
    assert found.item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("negative_temperature", [0.05, 1.0])
def test_an_own_hard_negative_is_met_by_its_anchor_alone(negative_temperature: float) -> None:
    anchors, candidates, negatives, targets = vectors(4, 5), vectors(8, 5), vectors(4, 5, seed=1), torch.arange(4)
    found = functional.own_negative_info_nce(anchors, candidates, negatives, targets, 0.05, negative_temperature)
    wanted = oracles.hard_negative_info_nce(
        anchors.numpy(), candidates.numpy(), negatives.numpy(), range(4), 0.05, negative_temperature, own=True
    )
    assert found.item() == pytest.approx(wanted, rel=1e-12)


def test_neighbours_are_the_most_similar_rows_best_first() -> None:
    queries, rows = vectors(3, 5), vectors(12, 5)
    found = functional.nearest(queries, rows, 4, None)
    for query, neighbours in zip(queries.numpy(), found.numpy(), strict=True):
        np.testing.assert_array_equal(neighbours, oracles.nearest(query, rows.numpy(), 4, None))


def test_a_query_does_not_find_its_own_copy_but_finds_the_same_sentence_elsewhere() -> None:
    rows = vectors(6, 5)
    rows[4] = rows[1]                                          # the same sentence, pushed at another time
    queries, own = rows[[1, 3]], torch.tensor([1, 3])
    found = functional.nearest(queries, rows, 2, own)
    torch.testing.assert_close(found[0, 0], rows[4], rtol=0, atol=0)
    assert not (found[1] == rows[3]).all(dim=-1).any()
    for at in range(2):
        wanted = oracles.nearest(queries[at].numpy(), rows.numpy(), 2, int(own[at]))
        np.testing.assert_array_equal(found[at].numpy(), wanted)


def test_more_neighbours_than_there_are_means_all_there_are() -> None:
    queries, rows = vectors(2, 5), vectors(3, 5)
    assert functional.nearest(queries, rows, 16, None).shape == (2, 3, 5)
    found = functional.nearest(queries, rows, 16, torch.tensor([0, 2]))
    assert found.shape == (2, 2, 5)
    assert not torch.isclose(found[0], rows[0]).all(dim=-1).any()
    assert not torch.isclose(found[1], rows[2]).all(dim=-1).any()


@pytest.mark.parametrize("unit", [True, False])
def test_an_augmented_positive_is_the_weighted_mean_of_itself_and_its_neighbours(unit: bool) -> None:
    positives, neighbours = vectors(3, 5, unit=unit), vectors(3, 4, 5)
    found = functional.augmented_positives(positives, neighbours, 2.0)
    for at in range(3):
        wanted = oracles.augmented_positive(positives[at].numpy(), neighbours[at].numpy(), 2.0)
        np.testing.assert_allclose(found[at].numpy(), wanted, rtol=1e-12)


def test_a_long_raw_positive_outweighs_its_neighbours_and_a_unit_one_is_averaged_away() -> None:
    positives, neighbours = vectors(3, 5), vectors(3, 16, 5)
    raw = functional.augmented_positives(20 * positives, neighbours, 2.0)
    assert (F.cosine_similarity(raw, positives) > 0.999).all()
    unit = functional.augmented_positives(positives, neighbours, 2.0)
    weight = torch.softmax(torch.tensor([0.5] + [0.0] * 16), 0)[0]
    assert weight < 0.1
    assert (F.cosine_similarity(unit, positives) < 0.95).all()


def test_the_nearest_layer_is_neither_the_embeddings_nor_the_last() -> None:
    layers = vectors(6, 20, 5, unit=False)
    layers[0] = 2 * layers[-1]                                 # the embeddings would win if they took part
    found = functional.nearest_layer(layers)
    assert found.tolist() == [oracles.nearest_layer(layers[:, at].numpy()) for at in range(20)]
    assert set(found.tolist()) <= {1, 2, 3, 4}


def grad(*shape: int, seed: int = 0) -> Tensor:
    return vectors(*shape, seed=seed).requires_grad_()


def test_gradients_of_the_losses_are_finite_differences() -> None:
    targets = torch.tensor([2, 0, 1])
    anchors, candidates, negatives = grad(3, 4), grad(5, 4), grad(3, 4, seed=1)
    assert torch.autograd.gradcheck(lambda a, c: functional.info_nce(a, c, targets, 0.5), (anchors, candidates))
    for loss in (functional.hard_negative_info_nce, functional.own_negative_info_nce):
        assert torch.autograd.gradcheck(
            lambda a, c, n, loss=loss: loss(a, c, n, targets, 0.5, 1.0), (anchors, candidates, negatives)
        )
    neighbours = vectors(3, 4, 4)
    assert torch.autograd.gradcheck(lambda p: functional.augmented_positives(p, neighbours, 2.0), (anchors,))
