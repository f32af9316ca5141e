"""DiffCSE: what is masked and filled in, what the discriminator sees, and the loss against a loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from cluster.errors import InputError
from cluster.world import Solo
from stages.methods import functional
from stages.methods.base import Batch
from stages.methods.diffcse import BatchNormHead, DiffCSE, DiffCSEConfig, draw, standardised
from tests import oracles, tiny

MASK = tiny.VOCABULARY.index("[MASK]")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random masked language model."""
    return save_generator(tmp_path_factory.mktemp("generator"))


def save_generator(folder: Path) -> str:
    torch.manual_seed(9)
    BertForMaskedLM(tiny.bert_config(depth=2)).save_pretrained(folder)
    return str(folder)


def method(generator: str, dropout: float = 0.0, **options: Any) -> DiffCSE:
    return DiffCSEConfig(name="diffcse", generator=generator, **options).build(tiny.encoder("mean", dropout))


def augmented(learner: DiffCSE, batch: Batch) -> Batch:
    return learner.augment(batch, np.arange(100, 100 + len(batch.input_ids), dtype=np.uint64), tiny.tokenizer())


def test_words_are_masked_by_chance_in_either_view_and_special_tokens_never(generator: str) -> None:
    plain = tiny.batch(400, seed=0)
    batch = augmented(method(generator, masked=0.3), plain)
    sentences, *views = batch.input_ids.split(400)
    assert torch.equal(sentences, plain.input_ids)
    words = sentences >= len(tiny.SPECIAL)
    for view in views:
        masked = view == MASK
        assert torch.equal(view[~masked], sentences[~masked])
        assert not masked[~words].any()
        assert masked[words].float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert (views[0] != views[1]).any()


def test_what_a_row_draws_follows_from_its_seed_alone(generator: str) -> None:
    learner, plain = method(generator), tiny.batch(6, seed=0)
    seeds = np.arange(6, dtype=np.uint64)
    whole = learner.augment(plain, seeds, tiny.tokenizer())
    length = int(plain.attention_mask[4].sum())
    part = Batch(plain.input_ids[4:5, :length], plain.attention_mask[4:5, :length])
    alone = learner.augment(part, seeds[4:5], tiny.tokenizer())
    assert alone.noise is not None
    assert whole.noise is not None
    assert torch.equal(alone.input_ids, whole.input_ids.unflatten(0, (3, 6))[:, 4, :length])
    assert torch.equal(alone.noise, whole.noise.unflatten(0, (3, 6))[:, 4, :length])


def test_tokens_are_drawn_with_the_chances_of_the_softmax() -> None:
    chances = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3])
    noise = (torch.arange(1000) + 0.5) / 1000
    drawn = draw(chances.log().expand(1000, 5), noise)
    assert torch.bincount(drawn, minlength=5).tolist() == [0, 500, 200, 0, 300]
    edges = draw(chances.log().expand(2, 5), torch.tensor([0.0, 1.0]))
    assert edges.tolist() == [1, 4]


@pytest.mark.parametrize("fill", ["sampled", "argmax"])
def test_the_generator_fills_in_masked_tokens_alone(generator: str, fill: str) -> None:
    learner = method(generator, fill=fill)
    batch = augmented(learner, tiny.batch(6, seed=0))
    sentences, masked, mask = batch.input_ids[:6].repeat(2, 1), batch.input_ids[6:], batch.attention_mask[6:]
    assert batch.noise is not None
    filled = learner.fill(sentences, masked, mask, batch.noise[6:])
    places = masked == MASK
    assert torch.equal(filled[~places], sentences[~places])
    with torch.no_grad():
        logits = BertForMaskedLM.from_pretrained(generator)(input_ids=masked, attention_mask=mask).logits
    if fill == "argmax":
        assert torch.equal(filled[places], logits.argmax(dim=-1)[places])
    else:
        drawn = zip(filled[places], logits[places].softmax(dim=-1), batch.noise[6:][places], strict=True)
        for token, chances, number in drawn:
            below = chances[:token].sum().item()
            assert below - 1e-6 <= number.item() <= below + chances[token].item() + 1e-6


def test_the_discriminator_is_the_encoder_with_an_embedding_in_the_first_place(generator: str) -> None:
    learner, batch = method(generator), tiny.batch(6, seed=0)
    learner.eval()
    ids, mask = batch.input_ids, batch.attention_mask
    first = learner.encoder.backbone.embeddings(input_ids=ids)[:, 0]    # type: ignore[operator, union-attr]
    states = learner.encoder.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = learner.discriminator.judge(states).squeeze(-1)
    torch.testing.assert_close(learner.discriminator(ids, mask, first), wanted)
    other = learner.discriminator(ids, mask, first + 1) - wanted
    assert (other[mask.bool()].abs() > 1e-6).all()             # every token sees it


def test_the_projector_is_that_of_torchs_modules() -> None:
    torch.manual_seed(0)
    head = BatchNormHead(8)
    nn.init.normal_(head.scale)
    nn.init.normal_(head.shift)
    peer = nn.Sequential(head.widen, nn.BatchNorm1d(16), nn.ReLU(), head.narrow, nn.BatchNorm1d(8, affine=False))
    peer[1].load_state_dict({"weight": head.scale, "bias": head.shift}, strict=False)
    rows = torch.randn(10, 8)
    torch.testing.assert_close(head(rows, Solo()), peer(rows))


@pytest.mark.parametrize("fill", ["sampled", "argmax"])
def test_the_loss_is_simcse_and_the_detection_of_replaced_tokens(generator: str, fill: str) -> None:
    learner = method(generator, fill=fill, temperature=0.5, replaced_weight=0.7)
    batch = augmented(learner, tiny.batch(6, seed=0))
    sentences, masked, mask = batch.input_ids[:6].repeat(2, 1), batch.input_ids[6:], batch.attention_mask[6:]
    assert batch.noise is not None
    with torch.no_grad():
        projected = learner.projector(learner.encoder(sentences, mask).embedding, Solo())
        filled = learner.fill(sentences, masked, mask, batch.noise[6:])
        chances = torch.sigmoid(-learner.discriminator(filled, mask, projected).double())
    own = [row.bool() for row in mask]
    rows = [[tensor[at][keep].numpy() for at, keep in enumerate(own)] for tensor in (chances, sentences, filled)]
    views = projected.double().numpy()
    contrast = oracles.info_nce(views[:6], views[6:], range(6), 0.5)
    detection = oracles.replaced_tokens(*rows)
    loss, metrics = learner(batch, Solo())
    assert metrics["loss_contrast"].item() == pytest.approx(contrast, rel=2e-5)
    assert metrics["loss_replaced"].item() == pytest.approx(detection, rel=2e-5)
    assert loss.item() == pytest.approx(contrast + 0.7 * detection, rel=2e-5)
    replaced = (filled != sentences).sum().item()
    assert metrics["replaced_tokens"].item() == pytest.approx(replaced / mask.sum().item())
    assert replaced > 0


def test_gradients_are_finite_differences() -> None:
    random = np.random.default_rng(0)
    rows = torch.from_numpy(random.normal(size=(5, 4))).requires_grad_()
    replaced = torch.from_numpy(random.random((5, 4)) < 0.3)
    assert torch.autograd.gradcheck(lambda x: functional.replaced_token_losses(x, replaced), rows)
    assert torch.autograd.gradcheck(lambda x: standardised(x, Solo()), rows)


def test_every_parameter_takes_part_in_the_loss_and_the_generator_is_none(generator: str) -> None:
    learner = method(generator)
    learner(augmented(learner, tiny.batch(6, seed=0)), Solo())[0].backward()
    assert [name for name, parameter in learner.named_parameters() if parameter.grad is None] == []
    assert not any("generator" in name for name in learner.state_dict())
    assert not any("discriminator" in name or "projector" in name for name in learner.encoder.state_dict())


def test_the_encoder_learns_from_the_detection_through_its_embedding(generator: str) -> None:
    learner = method(generator)
    batch = augmented(learner, tiny.batch(6, seed=0))
    gradients = []
    for weight in (0.0, 1.0):
        learner.config = learner.config.model_copy(update={"replaced_weight": weight})
        learner.zero_grad()
        learner(batch, Solo())[0].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in learner.encoder.parameters()]))  # type: ignore[union-attr]
    assert (gradients[0] - gradients[1]).norm() > 1e-3


@pytest.mark.parametrize("rows", [[[2, 9, 3]], [[2, 3], [2, 3]], [[2, 9, 3]] * 3])
def test_a_single_sentence_empty_and_equal_ones_have_finite_gradients(generator: str, rows: list[list[int]]) -> None:
    learner = method(generator)
    ids = torch.tensor(rows)
    loss, _ = learner(augmented(learner, Batch(ids, torch.ones_like(ids))), Solo())
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(parameter.grad).all() for parameter in learner.parameters())


def test_without_a_generator_named_the_encoders_own_checkpoint_is_it(generator: str) -> None:
    encoder = tiny.encoder("mean")
    encoder.config = encoder.config.model_copy(update={"name": generator})
    learner = DiffCSEConfig(name="diffcse").build(encoder)
    found, wanted = learner.generator.module.state_dict(), BertForMaskedLM.from_pretrained(generator).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not any(parameter.requires_grad for parameter in learner.generator.module.parameters())


def test_a_generator_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.method\.generator='nowhere/at-all' is no folder with a config\.json"):
        DiffCSEConfig(name="diffcse", generator="nowhere/at-all").check(4, 8)
    (tmp_path / "empty").mkdir()
    tiny.bert_config().save_pretrained(tmp_path / "empty")
    with pytest.raises(InputError, match="cannot be loaded as a masked language model"):
        method(str(tmp_path / "empty"))
    BertModel(tiny.bert_config()).save_pretrained(tmp_path / "headless")
    with pytest.raises(InputError, match="has no head that predicts masked tokens; name a masked language model"):
        method(str(tmp_path / "headless"))
    other = BertConfig(**tiny.bert_config().to_dict() | {"vocab_size": 70})
    BertForMaskedLM(other).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="has 70 tokens and the encoder 64; name one of the encoder's vocabulary"):
        method(str(tmp_path / "other"))


def test_padding_costs_nothing(generator: str) -> None:
    learner = method(generator)
    batch = augmented(learner, tiny.batch(6, seed=0))
    assert batch.noise is not None
    wider = replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, 3)),
        attention_mask=F.pad(batch.attention_mask, (0, 3)),
        noise=F.pad(batch.noise, (0, 3)),
    )
    assert learner(wider, Solo())[0].item() == pytest.approx(learner(batch, Solo())[0].item(), rel=1e-5)
