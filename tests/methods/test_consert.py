"""ConSERT: its loss against a loop, and what its augmentations leave of a sentence."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cluster.world import Solo
from stages.methods.base import Batch
from stages.methods.consert import ConSERT, ConSERTConfig, kept_numbers
from stages.methods.functional import nt_xent
from tests import oracles, tiny

SEEDS = np.arange(6, dtype=np.uint64)


def learner(pooling: str = "mean@3+4", **options: Any) -> ConSERT:
    return ConSERTConfig(name="consert", **options).build(tiny.encoder(pooling, dropout=0.0))


def views(method: ConSERT) -> Batch:
    return method.augment(tiny.batch(6, seed=0), SEEDS, tiny.tokenizer())


def units(*shape: int) -> torch.Tensor:
    return F.normalize(torch.from_numpy(np.random.default_rng(shape).normal(size=shape)), dim=-1)


def test_the_loss_is_the_papers_sum() -> None:
    first, second = units(5, 8), units(5, 8).flip(0)
    found = nt_xent(first, second, first, second, torch.arange(5), 0.1)
    assert found.item() == pytest.approx(oracles.nt_xent(first.numpy(), second.numpy(), 0.1), rel=1e-12)


def test_gradients_are_finite_differences() -> None:
    sides = units(4, 5).requires_grad_(), units(4, 6)[:, :5].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda u, v: nt_xent(u, v, u, v, torch.arange(4), 0.5), sides)


def test_shuffled_views_keep_words_and_special_tokens() -> None:
    method = learner(first="none")
    plain, batch = tiny.batch(6, seed=0), views(method)
    first, second = batch.input_ids.chunk(2)
    assert torch.equal(first, plain.input_ids)
    assert not torch.equal(second, plain.input_ids)
    assert torch.equal(second < 5, plain.input_ids < 5)
    assert torch.equal(second.sort(dim=1)[0], plain.input_ids.sort(dim=1)[0])
    assert torch.equal(batch.attention_mask, plain.attention_mask.repeat(2, 1))
    assert torch.equal(views(method).input_ids, batch.input_ids)                   # the seeds decide


def test_the_method_compares_both_views() -> None:
    method = learner(first="none", second="shuffle")
    batch = views(method)
    with torch.no_grad():
        both = method.encoder(batch.input_ids, batch.attention_mask).embedding.double().numpy()
    loss, _ = method(batch, Solo())
    assert loss.item() == pytest.approx(oracles.nt_xent(both[:6], both[6:], 0.1), rel=2e-5)


@pytest.mark.parametrize("augmentation", ["none", "shuffle", "token-cutoff", "feature-cutoff", "dropout"])
def test_cutoff_zeroes_the_papers_part_of_each_sentence(augmentation: Any) -> None:
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    kept = kept_numbers(torch.randn(2, 9, 10), mask, augmentation, 0.3)
    assert kept.shape == (2, 9, 10)
    for row, length in zip(kept, (9, 5), strict=True):
        tokens = row[:length]
        gone = int((tokens == 0).sum())
        match augmentation:
            case "token-cutoff":
                cut = int(0.3 * length)
                assert sorted(tokens.mean(dim=1).tolist()) == [0.0] * cut + [1.0] * (length - cut)
            case "feature-cutoff":
                assert sorted(tokens.mean(dim=0).tolist()) == [0.0] * 3 + [1.0] * 7
            case "dropout":
                assert gone == int(0.3 * 10 * length)
            case _:
                assert gone == 0


def test_cutoff_reaches_the_encoder_for_one_pass_only() -> None:
    method = learner(second="none", rate=0.5)
    batch = views(method)
    plain = method.encoder(batch.input_ids, batch.attention_mask)
    _, metrics = method(batch, Solo())
    assert metrics["positive_cosine"] < 0.999
    again = method.encoder(batch.input_ids, batch.attention_mask)
    assert torch.equal(again.embedding, plain.embedding)
    with torch.no_grad():
        none, _ = learner(first="none", second="none")(batch, Solo())
    alike = plain.embedding[:6].detach().double().numpy()
    assert none.item() == pytest.approx(oracles.nt_xent(alike, alike, 0.1), rel=2e-5)


@pytest.mark.parametrize("augmentation", ["shuffle", "token-cutoff", "feature-cutoff", "dropout"])
def test_every_parameter_takes_part_in_the_loss(augmentation: str) -> None:
    method = learner("layer-attention", first=augmentation)
    method(views(method), Solo())[0].backward()
    assert [name for name, parameter in method.named_parameters() if parameter.grad is None] == []


def test_a_sentence_of_one_word_many_times_gives_finite_gradients() -> None:
    for augmentation in ("token-cutoff", "dropout", "none"):
        method = learner(first=augmentation, rate=0.9)
        ids = torch.tensor([[2, 7, 3]] * 4)
        loss, _ = method(method.augment(Batch(ids, torch.ones_like(ids)), SEEDS[:4], tiny.tokenizer()), Solo())
        loss.backward()
        for parameter in method.parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
