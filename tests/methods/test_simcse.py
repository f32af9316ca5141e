"""SimCSE against a loop, and against the field's own implementation."""

import pytest
import torch
from torch import nn

from cluster.world import Solo
from stages.methods.simcse import SimCSEConfig
from tests import oracles, tiny


@pytest.mark.parametrize("pooling", ["cls", "mean", "layer-attention"])
@pytest.mark.parametrize("mlp", ["none", "train-only"])
def test_the_loss_is_equation_1(pooling: str, mlp: str) -> None:
    learner, batch = SimCSEConfig(name="simcse", mlp=mlp).build(tiny.encoder(pooling)), tiny.batch(6, seed=0)
    torch.manual_seed(5)
    with torch.no_grad():
        embeddings = learner.encoder(batch.input_ids.repeat(2, 1), batch.attention_mask.repeat(2, 1)).embedding
        if learner.mlp is not None:
            embeddings = torch.tanh(learner.mlp.dense(embeddings))
    torch.manual_seed(5)
    found, _ = learner(batch, Solo())
    views = embeddings.double().numpy()
    assert found.item() == pytest.approx(oracles.info_nce(views[:6], views[6:], range(6), 0.05), rel=2e-5)


def test_the_head_is_for_training_alone() -> None:
    learner = SimCSEConfig(name="simcse").build(tiny.encoder("cls"))
    assert learner.mlp is not None
    assert not any("mlp" in name for name in learner.encoder.state_dict())


class Answers(nn.Module):
    """Stands where sentence-transformers expects a model: it returns the embeddings that it is given."""

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": features["embedding"]}


def test_loss_and_gradients_are_those_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    learner, batch = SimCSEConfig(name="simcse").build(tiny.encoder("cls")), tiny.batch(6, seed=0)
    assert learner.mlp is not None
    torch.manual_seed(5)
    ours, _ = learner(batch, Solo())
    ours.backward()
    gradients = [parameter.grad.clone() for parameter in learner.parameters()]

    learner.zero_grad()
    torch.manual_seed(5)
    both = learner.encoder(batch.input_ids.repeat(2, 1), batch.attention_mask.repeat(2, 1)).embedding
    first, second = learner.mlp(both).split(6)
    theirs = MultipleNegativesRankingLoss(Answers(), scale=20.0)(
        [{"embedding": first}, {"embedding": second}], torch.empty(0)
    )
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for ours_, parameter in zip(gradients, learner.parameters(), strict=True):
        torch.testing.assert_close(ours_, parameter.grad, rtol=1e-4, atol=1e-6)
