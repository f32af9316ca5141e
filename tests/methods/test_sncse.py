"""SNCSE: negations by rules, and their loss against a loop."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import BertTokenizer

from cluster.errors import InputError
from cluster.world import Solo
from stages.methods import functional
from stages.methods.base import Batch
from stages.methods.negation import negate
from stages.methods.sncse import SNCSE, SNCSEConfig
from tests import oracles, tiny

ENGLISH = ["it", "is", "can", "not", "a", "red", "house", ".", "'", "t"]
SENTENCES = ["it is a red house", "a red house .", "it can ' t", "a house is not red .", "it can", "house ."]
NEGATED = [True, False, True, True, True, False]


def tokenizer() -> BertTokenizer:
    """A word a token, some of them English."""
    words = [*tiny.SPECIAL, *ENGLISH, *tiny.WORDS[: -len(ENGLISH)]]
    return BertTokenizer(vocab={word: at for at, word in enumerate(words)})


def method(**options: Any) -> SNCSE:
    return SNCSEConfig(name="sncse", **options).build(tiny.encoder("mean", dropout=0.0))


def batch_of(*sentences: str) -> Batch:
    found = tokenizer()(list(sentences), padding=True, return_tensors="pt")
    return Batch(found["input_ids"], found["attention_mask"])


def augmented(learner: SNCSE, *sentences: str) -> Batch:
    return learner.augment(batch_of(*sentences), np.arange(len(sentences), dtype=np.uint64), tokenizer())


@pytest.mark.parametrize(
    ("sentence", "negation"),
    [
        ("the house is red", "the house is not red"),
        ("he thinks they were late", "he thinks they were not late"),
        ("it may rain", "it may not rain"),
        ("he has been there", "he has not been there"),
        ("they had painted it", "they had not painted it"),
        ("they do not know", "they do know"),
        ("Not all is lost", "all is lost"),
        ("we cannot win", "we can win"),
        ("I can't see, he is gone", "I can see, he is gone"),
        ("i won ' t go", "i will go"),                         # as a tokenizer decodes it
        ("it isn’t and is not", "it is and is not"),           # once
    ],
)
def test_a_sentence_is_negated_by_the_first_rule_that_fits(sentence: str, negation: str) -> None:
    assert negate(sentence) == negation


@pytest.mark.parametrize(
    "sentence", ["the dog barked", "he had a dog", "in may 1990 it rained", "Will and May left", "nothing", "", "notes"]
)
def test_a_sentence_that_no_rule_fits_has_no_negation(sentence: str) -> None:
    assert negate(sentence) is None


def test_negations_are_tokenised_anew_and_other_sentences_stand_below_as_themselves() -> None:
    batch = augmented(method(), *SENTENCES)
    assert batch.input_ids.shape == (12, 8)
    texts = tokenizer().batch_decode(batch.input_ids, skip_special_tokens=True)
    assert texts[6:] == ["it is not a red house", "a red house.", "it can", "a house is red.", "it can not", "house."]
    assert (batch.input_ids[:6] != batch.input_ids[6:]).any(dim=1).tolist() == NEGATED
    assert torch.equal(batch.attention_mask, (batch.input_ids != 0).long())


def test_a_negation_is_cut_to_the_length_of_training_sentences() -> None:
    learner = method()
    learner.encoder.config = learner.encoder.config.model_copy(update={"max_length": 7})
    batch = augmented(learner, "it is a red house", "a red house red is")
    assert batch.input_ids.shape == (4, 7)
    assert torch.equal(batch.input_ids[1], batch.input_ids[3])     # its not would stand behind the end


@pytest.mark.parametrize("mlp", ["none", "train-only"])
def test_the_loss_is_simcse_and_the_margin_loss_of_sentences_with_a_negation(mlp: str) -> None:
    learner = method(mlp=mlp, margin_weight=0.7, temperature=0.2, least_margin=0.25)
    batch = augmented(learner, *SENTENCES)
    with torch.no_grad():
        embeddings = learner.encoder(batch.input_ids, batch.attention_mask).embedding
        views = (embeddings if learner.mlp is None else learner.mlp(embeddings)).double().numpy()
    first, others = views[:6], views[6:]                       # without dropout both views are the same
    margins = [
        oracles.bidirectional_margin(anchor, anchor, other, 0.25, 0.3)
        for anchor, other, has in zip(first, others, NEGATED, strict=True)
        if has
    ]
    contrast = oracles.info_nce(first, first, range(6), 0.2)
    loss, metrics = learner(batch, Solo())
    assert metrics["loss_contrast"].item() == pytest.approx(contrast, rel=2e-5)
    assert metrics["loss_margin"].item() == pytest.approx(np.mean(margins), rel=2e-5)
    assert loss.item() == pytest.approx(contrast + 0.7 * np.mean(margins), rel=2e-5)
    assert metrics["soft_negatives"].item() == pytest.approx(4 / 6)


def test_margins_within_the_bounds_cost_nothing_and_others_what_they_are_beyond() -> None:
    random = np.random.default_rng(0)
    sides = [F.normalize(torch.from_numpy(random.normal(size=(40, 3))), dim=-1) for _ in range(3)]
    for alpha, beta in ((0.1, 0.3), (0.0, 2.0)):
        wanted = [oracles.bidirectional_margin(*row, alpha, beta) for row in zip(*map(np.array, sides), strict=True)]
        found = functional.bidirectional_margins(*sides, alpha, beta)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-15)
    plane = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    at = torch.tensor([0.0, 0.05, 0.2, 0.5], dtype=torch.float64)     # the negative's cosine is lower by so much
    lower = torch.stack([1 - at, (1 - (1 - at) ** 2).sqrt()], dim=1)
    costs = functional.bidirectional_margins(plane.expand(4, 2), plane.expand(4, 2), lower, 0.1, 0.3)
    assert costs.tolist() == pytest.approx([0.1, 0.05, 0.0, 0.2])


def test_gradients_of_the_margins_are_finite_differences() -> None:
    random = np.random.default_rng(0)
    sides = [torch.from_numpy(random.normal(size=(6, 4))).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *units: functional.bidirectional_margins(*units, 0.1, 0.3), sides)


@pytest.mark.parametrize("sentences", [("a red house", "house ."), ("it is red",), ("it is", "it is", "it is")])
def test_batches_without_negations_or_of_equal_sentences_have_finite_gradients(sentences: tuple[str, ...]) -> None:
    learner = method()
    loss, metrics = learner(augmented(learner, *sentences), Solo())
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(parameter.grad).all() for parameter in learner.parameters())
    if not metrics["soft_negatives"]:
        assert metrics["loss_margin"] == 0


def test_margins_that_leave_nothing_between_them_are_refused() -> None:
    with pytest.raises(InputError, match=r"least_margin=0\.4 is more than train\.method\.greatest_margin=0\.3; lower"):
        SNCSEConfig(name="sncse", least_margin=0.4).check(4, 8)


@pytest.mark.parametrize("text", ["a can of soda fell", "the will of the king", "in may it rained", "may is a name"])
def test_names_and_things_are_no_auxiliaries_in_uncased_text_either(text: str) -> None:
    found = negate(text)
    assert found is None or not re.search(r"\b(can|will|may) not\b", found)
