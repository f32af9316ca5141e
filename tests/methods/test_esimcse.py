"""ESimCSE: its loss over several steps against a loop with a list as queue, and what a checkpoint must hold."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from cluster.errors import InputError
from cluster.world import Solo
from stages.methods.base import Batch
from stages.methods.esimcse import PREFIX, ESimCSE, ESimCSEConfig
from stages.methods.registry import MethodConfig
from tests import oracles, tiny


def learner(dropout: float = 0.0, pooling: str = "cls", queue_length: int = 10, **options: Any) -> ESimCSE:
    encoder = tiny.encoder(pooling, dropout)
    return ESimCSEConfig(name="esimcse", queue_length=queue_length, **options).build(encoder)


def batch_of(method: ESimCSE, step: int, rows: int = 4) -> Batch:
    seeds = np.arange(rows, dtype=np.uint64) + 10 * step
    return method.augment(tiny.batch(rows, seed=step), seeds, tiny.tokenizer())


def descend(method: ESimCSE, loss: torch.Tensor) -> None:
    """One step of plain gradient descent, large enough to tell the momentum encoder from the encoder."""
    method.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in method.parameters():
            parameter -= 0.05 * parameter.grad                 # type: ignore[operator]


def weights_of(method: ESimCSE) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy().copy() for name, value in method.encoder.named_parameters()}


@pytest.mark.parametrize("mlp", ["none", "train-only"])
@pytest.mark.parametrize("pooling", ["cls", "layer-attention"])
def test_every_step_is_the_papers_loss_over_a_queue_of_momentum_embeddings(mlp: str, pooling: str) -> None:
    method = learner(mlp=mlp, pooling=pooling, momentum=0.7)
    oracle = oracles.ESimCSE(10, 0.7, weights_of(method))
    follower = tiny.encoder(pooling, 0.0).eval()  # type: ignore[arg-type]
    for step in range(5):
        batch = batch_of(method, step)
        with torch.no_grad():
            embeddings = method.encoder(batch.input_ids, batch.attention_mask).embedding
            compared = (embeddings if method.mlp is None else method.mlp(embeddings)).double().numpy()
            wanted = oracle.loss(compared[:4], compared[4:])
            oracle.update(weights_of(method))
            for name, parameter in follower.named_parameters():
                parameter.copy_(torch.from_numpy(oracle.weights[name]))
            slow = follower(batch.input_ids[:4], batch.attention_mask[:4]).embedding
            oracle.push((slow if method.mlp is None else method.mlp(slow)).double().numpy())
        loss, metrics = method(batch, Solo())
        assert loss.item() == pytest.approx(wanted, rel=2e-5), step
        assert metrics["queue_fill"].item() == pytest.approx(min(4 * step, 10) / 10)
        descend(method, loss)
    assert len(method.queue.rows) == 10


def test_the_queue_gets_no_gradient_and_the_momentum_encoder_no_dropout() -> None:
    method = learner(dropout=0.3)
    method.train()
    batch = batch_of(method, 0)
    method(batch, Solo())[0].backward()
    assert method.momentum is not None
    assert all(parameter.grad is None for parameter in method.momentum.module.parameters())
    assert not method.queue.rows.requires_grad
    first = method.queue.rows.clone()
    method(batch, Solo())
    torch.testing.assert_close(method.queue.rows[4:], first)   # the same weights, the same sentences


def test_momentum_encoder_and_queue_are_no_weights_of_the_method() -> None:
    method = learner()
    assert not any("momentum" in name or "queue" in name for name in method.state_dict())
    assert ESimCSEConfig.needs_whole_weights


def test_what_is_resumed_goes_on_as_if_never_stopped() -> None:
    method = learner(momentum=0.7)
    for step in range(3):
        descend(method, method(batch_of(method, step), Solo())[0])
    again = learner(momentum=0.7)
    again.load_state_dict(method.state_dict())
    again.load_resume_state(method.resume_state())
    for step in range(3, 6):
        losses = [one(batch_of(one, step), Solo())[0] for one in (method, again)]
        assert losses[0].item() == losses[1].item()
        for one, loss in zip((method, again), losses, strict=True):
            descend(one, loss)
    states = [one.resume_state() for one in (method, again)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(name.startswith(PREFIX) for name in states[0])


def test_without_repetition_and_queue_it_is_simcse() -> None:
    method = learner(queue_length=0, repetition=None, mlp="none")
    assert method.momentum is None
    assert method.resume_state() == {}
    for step in range(2):
        batch = batch_of(method, step)
        assert torch.equal(*batch.input_ids.chunk(2))
        with torch.no_grad():
            views = method.encoder(batch.input_ids, batch.attention_mask).embedding.double().numpy()
        loss, metrics = method(batch, Solo())
        assert loss.item() == pytest.approx(oracles.info_nce(views[:4], views[4:], range(4), 0.05), rel=2e-5)
        assert "queue_fill" not in metrics


def test_positives_are_the_sentences_with_words_repeated() -> None:
    method = learner(repetition=0.9)
    batch = batch_of(method, 0, rows=30)
    longer = 0
    for sentence, positive in zip(*batch.input_ids.chunk(2), strict=True):
        words, repeated = sentence[sentence != 0].tolist(), positive[positive != 0].tolist()
        longer += len(repeated) > len(words)
        assert len(repeated) <= 2 * len(words) - 2
        at = 0
        for token in repeated:                                 # a copy follows its original
            at += token == words[at] if at < len(words) else 0
            assert token in (words[at - 1], words[at] if at < len(words) else None)
        assert at == len(words)
    assert longer > 20


@pytest.mark.parametrize("queue_length", [0, 10])
def test_every_parameter_takes_part_in_the_loss(queue_length: int) -> None:
    method = learner(0.1, "layer-attention", queue_length)
    for step in range(2):
        loss, _ = method(batch_of(method, step), Solo())
    loss.backward()
    assert [name for name, parameter in method.named_parameters() if parameter.grad is None] == []


def test_a_batch_of_one_sentence_many_times_gives_finite_gradients() -> None:
    method = learner()
    plain = tiny.batch(1, seed=0)
    same = Batch(plain.input_ids.repeat(4, 1), plain.attention_mask.repeat(4, 1))
    for step in range(3):
        loss, _ = method(method.augment(same, np.arange(4, dtype=np.uint64) + step, tiny.tokenizer()), Solo())
    loss.backward()
    for parameter in method.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_a_queue_shorter_than_a_batch_is_refused() -> None:
    config = TypeAdapter(MethodConfig).validate_python({"name": "esimcse"})
    config.check(12, 160)
    with pytest.raises(InputError, match=r"queue_length=160 is shorter than train\.batch_size=256.*at least 256, or 0"):
        config.check(12, 256)
