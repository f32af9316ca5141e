"""SG-OPT: the guides, the loss against a loop, and the distance from the first weights."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cluster.config import ClusterConfig
from cluster.errors import InputError
from cluster.world import Solo
from stages.encoder import EncoderConfig
from stages.methods import functional, sg_opt
from stages.methods.base import Batch
from stages.methods.sg_opt import SGOPT, SGOPTConfig
from stages.train import TrainConfig, TrainJob, check_train
from tests import oracles, tiny


@pytest.fixture(autouse=True)
def _small_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sg_opt, "PROJECTION", 24)


def method(pooling: str = "cls", dropout: float = 0.0, **options: Any) -> SGOPT:
    return SGOPTConfig(name="sg-opt", **options).build(tiny.encoder(pooling, dropout))


def disturb(learner: SGOPT) -> None:
    """Move the encoder as training would."""
    with torch.no_grad():
        for parameter in learner.encoder.backbone.encoder.parameters():    # type: ignore[union-attr]
            parameter += 0.01


@pytest.mark.parametrize("guides", ["mean", "max"])
def test_guides_are_the_layers_of_the_encoder_as_it_was_given(guides: str) -> None:
    learner, batch = method(dropout=0.1, guides=guides), tiny.batch(6, seed=0)
    states = learner.encoder.eval().backbone(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True
    ).hidden_states
    assert len(states) == 5                                    # the embeddings and 4 layers
    learner.train()
    disturb(learner)
    found = learner.guides(batch)
    for row, mask in enumerate(batch.attention_mask.bool()):
        for layer, tokens in enumerate(states):
            own = tokens[row][mask]
            wanted = own.mean(dim=0) if guides == "mean" else own.max(dim=0).values
            torch.testing.assert_close(found[row, layer], wanted)


def test_the_loss_finds_each_layer_among_all_layers_of_other_sentences() -> None:
    random = np.random.default_rng(0)
    anchors, layers = random.normal(size=(5, 8)), random.normal(size=(5, 3, 8))
    units = F.normalize(torch.from_numpy(anchors), dim=-1), F.normalize(torch.from_numpy(layers), dim=-1)
    for temperature in (0.01, 0.5):
        found = functional.self_guided_loss(*units, torch.arange(5), temperature)
        assert found.item() == pytest.approx(oracles.self_guided(anchors, layers, temperature), rel=1e-12)
    part = functional.self_guided_loss(units[0][3:], units[1], torch.tensor([3, 4]), 0.5)
    first = functional.self_guided_loss(units[0][:3], units[1], torch.arange(3), 0.5)
    assert (2 * part + 3 * first).item() / 5 == pytest.approx(found.item(), rel=1e-12)


def test_with_one_layer_the_loss_is_a_cross_entropy() -> None:
    random = np.random.default_rng(1)
    anchors, others = (F.normalize(torch.from_numpy(random.normal(size=(6, 8))), dim=-1) for _ in range(2))
    found = functional.self_guided_loss(anchors, others[:, None], torch.arange(6), 0.05)
    torch.testing.assert_close(found, F.cross_entropy(anchors @ others.T / 0.05, torch.arange(6)))


def test_gradients_are_finite_differences() -> None:
    random = np.random.default_rng(0)
    sides = [torch.from_numpy(random.normal(size=shape)).requires_grad_() for shape in ((3, 4), (3, 2, 4))]
    assert torch.autograd.gradcheck(lambda a, b: functional.self_guided_loss(a, b, torch.arange(3), 0.5), sides)


@pytest.mark.parametrize("guides", ["mean", "max"])
def test_the_total_is_the_contrast_and_the_squared_distance_from_the_first_weights(guides: str) -> None:
    learner, batch = method(guides=guides, drift_weight=0.3, temperature=0.1), tiny.batch(6, seed=0)
    assert learner(batch, Solo())[1]["drift"] == 0
    before = [parameter.detach().double().clone() for parameter in learner.encoder.backbone.parameters()]
    disturb(learner)
    after = [parameter.detach().double() for parameter in learner.encoder.backbone.parameters()]
    drift = sum(float(((a - b) ** 2).sum()) for a, b in zip(after, before, strict=True))
    with torch.no_grad():
        embeddings = learner.encoder(batch.input_ids, batch.attention_mask).embedding
        anchors, layers = (
            learner.projector(vectors).double().numpy() for vectors in (embeddings, learner.guides(batch))
        )
    contrast = oracles.self_guided(anchors, layers, 0.1)
    loss, metrics = learner(batch, Solo())
    assert metrics["drift"].item() == pytest.approx(drift, rel=2e-5)
    assert metrics["loss_contrast"].item() == pytest.approx(contrast, rel=2e-5)
    assert loss.item() == pytest.approx(contrast + 0.3 * drift, rel=2e-5)


def test_a_run_that_goes_on_is_held_against_the_same_first_weights() -> None:
    learner, batch = method(), tiny.batch(6, seed=0)
    disturb(learner)
    again = method()
    again.load_state_dict(learner.state_dict())
    again.load_resume_state(learner.resume_state())
    assert again(batch, Solo())[1] == learner(batch, Solo())[1]
    assert again.drift() > 0


@pytest.mark.parametrize("pooling", ["cls", "layer-attention"])
def test_every_parameter_but_those_of_the_embeddings_takes_part_in_the_loss(pooling: str) -> None:
    learner = method(pooling)
    learner(tiny.batch(6, seed=0), Solo())[0].backward()
    without = [name for name, parameter in learner.named_parameters() if parameter.grad is None]
    assert without
    assert all(name.startswith("encoder.backbone.embeddings.") for name in without)
    assert not any("fixed" in name for name in learner.state_dict())
    assert not any(parameter.requires_grad for parameter in learner.fixed.module.parameters())


@pytest.mark.parametrize("rows", [[[2, 9, 3]], [[2, 3], [2, 3]]])
def test_a_single_sentence_and_equal_ones_have_finite_gradients(rows: list[list[int]]) -> None:
    learner, ids = method(), torch.tensor(rows)
    loss, _ = learner(Batch(ids, torch.ones_like(ids)), Solo())
    loss.backward()
    assert torch.isfinite(loss)
    for parameter in learner.parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


def test_it_is_refused_where_no_worker_has_all_weights(tmp_path: Any) -> None:
    method_config = SGOPTConfig(name="sg-opt")
    encoder = EncoderConfig(name=tiny.save_bert(tmp_path / "bert"), max_length=8)
    job = TrainJob(train=TrainConfig(method=method_config), encoder=encoder, evaluation_data=None, seed=0)
    with pytest.raises(InputError, match=r"sg-opt needs all weights on every worker.*set it to ddp, zero1 or zero2"):
        check_train(job, ClusterConfig(strategy="zero3"))
