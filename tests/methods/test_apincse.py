"""APINCSE as a whole against a loop over its equations, under every option."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cluster.errors import InputError
from cluster.world import Solo
from stages.encoder import Encoding, LayerAttentionConfig
from stages.methods.apincse import APINCSE, APINCSEConfig
from tests import oracles, tiny

BATCH = 6
STEPS = 5

OPTIONS: list[dict[str, Any]] = [
    {},
    {"anchor_norm": "raw"},
    {"include_self": True},
    {"queue_warmup": "none"},
    {"queue_warmup": "none", "include_self": True, "anchor_norm": "raw"},
    {"neighbours": 1},
    {"neighbours": 13, "queue_warmup": "none"},                # more than there are at first
    {"beta": 0.1},
    {"temperature": 0.5},
    {"negative_layer": 1},
    {"negative_layer": 3},
    {"negative_temperature": False},
    {"negatives": "own"},
    {"negatives": "own", "negative_temperature": False},
    {"detach_negative": True},
    {"mlp": "train-only"},
    {"instance_weight": 0.0},
    {"augmented_weight": 0.0},
    {"negative_weight": 0.0},
    {"augmented_weight": 0.0, "negative_weight": 0.0},
    {"instance_weight": 0.3, "augmented_weight": 0.7, "negative_weight": 2.0},
]


def method(pooling: str = "layer-attention", dropout: float = 0.1, **options: Any) -> APINCSE:
    config = APINCSEConfig(name="apincse", **{"queue_length": 14, "neighbours": 4} | options)
    return config.build(tiny.encoder(pooling, dropout))


def two_encodings(learner: APINCSE, batch: tiny.Batch, seed: int) -> Encoding:
    """What the two views of a step with this seed are: dropout is drawn in the same order."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return learner.encoder(batch.input_ids.repeat(2, 1), batch.attention_mask.repeat(2, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_loss_is_equation_20_of_two_views_and_a_queue(options: dict[str, Any]) -> None:
    learner = method(**options)
    oracle = oracles.APINCSE(**learner.config.model_dump())
    for step in range(STEPS):
        batch = tiny.batch(BATCH, seed=step)
        both = two_encodings(learner, batch, seed=step)
        embeddings = both.embedding.double()
        if learner.mlp is not None:
            dense = learner.mlp.dense
            embeddings = torch.tanh(embeddings @ dense.weight.double().T + dense.bias.double()).detach()
        cls = both.layers.cls[:, :BATCH].transpose(0, 1).double().numpy()
        wanted, parts = oracle.loss(embeddings[:BATCH].numpy(), embeddings[BATCH:].numpy(), cls)

        torch.manual_seed(step)
        loss, metrics = learner(batch, Solo())
        assert loss.item() == pytest.approx(wanted, rel=2e-5)
        found = {name: metrics[name].item() for name in metrics if name.startswith("loss_")}
        assert found == pytest.approx(parts, rel=2e-5)


def test_two_views_of_a_sentence_differ_by_dropout_alone() -> None:
    batch = tiny.batch(BATCH, seed=0)
    assert method()(batch, Solo())[1]["positive_cosine"] < 0.999
    assert method(dropout=0.0)(batch, Solo())[1]["positive_cosine"] == pytest.approx(1, abs=1e-6)


def test_the_augmented_loss_waits_until_the_queue_is_full() -> None:
    learner = method()
    applied = ["loss_augmented" in learner(tiny.batch(BATCH, seed=step), Solo())[1] for step in range(4)]
    assert applied == [False, False, True, True]               # 6, 12, 18 of 14 places


def test_metrics_say_which_layers_the_hard_negatives_came_from() -> None:
    learner, batch = method(dropout=0.0), tiny.batch(BATCH, seed=0)
    metrics = learner(batch, Solo())[1]
    cls = two_encodings(learner, batch, 0).layers.cls[:, :BATCH].transpose(0, 1).numpy()
    chosen = [oracles.nearest_layer(layers) for layers in cls]
    shares = [metrics[f"negative_layer/{layer}"].item() for layer in (1, 2, 3)]
    assert shares == pytest.approx([chosen.count(layer) / BATCH for layer in (1, 2, 3)])
    assert "negative_layer/4" not in metrics
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"anchor_norm": "raw"}, {"negatives": "own", "negative_temperature": False}, {"detach_negative": True},
     {"instance_weight": 0.0}, {"augmented_weight": 0.0, "negative_weight": 0.0}],
    ids=str,
)
def test_gradients_are_finite_differences_of_equation_20(options: dict[str, Any]) -> None:
    """Along random directions, with what lies in the queue held fast."""
    learner = method("mean", **options)                        # then [CLS] vectors act as hard negatives alone
    oracle = oracles.APINCSE(**learner.config.model_dump())
    seen: list[Encoding] = []

    def keep(_module: nn.Module, _inputs: Any, encoding: Encoding) -> None:
        encoding.embedding.retain_grad()
        encoding.layers.cls.retain_grad()
        seen.append(encoding)

    learner.encoder.register_forward_hook(keep)
    for step in range(4):                                      # the queue is full from the third on
        loss, _ = learner(tiny.batch(BATCH, seed=step), Solo())
        before, embeddings, cls = deepcopy(oracle), *(
            tensor.detach().double().numpy() for tensor in (seen[-1].embedding, seen[-1].layers.cls)
        )
        oracle.loss(embeddings[:BATCH], embeddings[BATCH:], cls[:, :BATCH].swapaxes(0, 1))
    loss.backward()

    def moved(by_embeddings: np.ndarray | float, by_cls: np.ndarray | float) -> float:
        h, c = embeddings + by_embeddings, cls + by_cls
        return deepcopy(before).loss(h[:BATCH], h[BATCH:], c[:, :BATCH].swapaxes(0, 1), embeddings[BATCH:])[0]

    random = np.random.default_rng(0)
    for _ in range(3):
        direction = 1e-5 * random.normal(size=embeddings.shape)
        found = (seen[-1].embedding.grad.double().numpy() * direction).sum()
        assert found == pytest.approx((moved(direction, 0) - moved(-direction, 0)) / 2, rel=2e-3)
        direction = 1e-5 * random.normal(size=cls.shape)
        gradient = seen[-1].layers.cls.grad
        if "detach_negative" in options or options.get("negative_weight") == 0:
            assert gradient is None or not gradient.any()
        else:
            found = (gradient.double().numpy() * direction).sum()
            assert found == pytest.approx((moved(0, direction) - moved(0, -direction)) / 2, rel=2e-3)


@pytest.mark.parametrize("detached", [False, True])
def test_gradients_reach_the_hard_negatives_layer_unless_detached(detached: bool) -> None:
    learner = method("mean", augmented_weight=0.0, negative_layer=2, detach_negative=detached)
    seen: list[Encoding] = []
    learner.encoder.register_forward_hook(lambda _module, _inputs, encoding: seen.append(encoding))
    learner.encoder.register_forward_hook(lambda _module, _inputs, encoding: encoding.layers.cls.retain_grad())
    learner(tiny.batch(BATCH, seed=0), Solo())[0].backward()
    reached = seen[0].layers.cls.grad
    if detached:
        assert reached is None or not reached.any()
    else:
        assert reached is not None
        rows = reached.abs().sum(dim=-1) > 0                   # (T+1, 2N)
        assert rows[2, :BATCH].all()
        rows[2, :BATCH] = False
        assert not rows.any()


def test_no_gradient_flows_through_the_queue() -> None:
    learner = method(instance_weight=0.0, negative_weight=0.0, queue_warmup="none")
    learner(tiny.batch(BATCH, seed=0), Solo())[0].backward()
    assert not learner.queue.rows.requires_grad
    learner.zero_grad()
    learner(tiny.batch(BATCH, seed=1), Solo())[0].backward()   # a graph kept from step one would raise here
    assert any(parameter.grad is not None for parameter in learner.parameters())


@pytest.mark.parametrize("rsn", ["top_tanh", "layers_tanh", "cls_tanh", "both_tanh", "proj_tanh"])
@pytest.mark.parametrize("queries", ["sum", "mean"])
def test_every_parameter_takes_part_in_the_loss(rsn: Any, queries: Any) -> None:
    layer_attention = LayerAttentionConfig(init="random", rsn=rsn, queries=queries)
    learner = APINCSEConfig(name="apincse").build(tiny.encoder(layer_attention=layer_attention))
    learner(tiny.batch(BATCH, seed=0), Solo())[0].backward()
    assert [name for name, parameter in learner.named_parameters() if parameter.grad is None] == []


def test_the_queue_is_resumed_and_is_no_weight() -> None:
    one, other = method(), method()
    one(tiny.batch(BATCH, seed=0), Solo())
    assert not any("queue" in name for name in one.state_dict())
    other.load_resume_state(one.resume_state())
    np.testing.assert_array_equal(other.queue.rows, one.queue.rows)
    assert other.queue.pushed == BATCH


def refusal(depth: int = 12, batch_size: int = 64, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        APINCSEConfig(name="apincse", **options).check(depth, batch_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_queue_shorter_than_the_batch_is_refused() -> None:
    message = refusal(queue_length=63)
    assert "queue_length=63" in message
    assert "at least 64" in message
    APINCSEConfig(name="apincse", queue_length=64).check(12, 64)


def test_as_many_neighbours_as_the_queue_is_long_are_refused() -> None:
    assert "1 to 63" in refusal(queue_length=64, neighbours=64)
    APINCSEConfig(name="apincse", queue_length=64, neighbours=63).check(12, 64)


def test_an_encoder_of_fewer_than_three_layers_is_refused() -> None:
    assert "has 2 layers" in refusal(depth=2)
    APINCSEConfig(name="apincse").check(3, 64)


def test_a_hard_negative_layer_must_lie_between_the_first_and_the_last() -> None:
    assert "argmax or 1 to 11" in refusal(negative_layer=12)
    APINCSEConfig(name="apincse", negative_layer=11).check(12, 64)
    with pytest.raises(ValueError, match="negative_layer"):
        APINCSEConfig(name="apincse", negative_layer=0)
