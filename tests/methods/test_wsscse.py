"""WSSCSE: its loss against a loop, its generator against transformers, and its ablations."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, RobertaConfig, RobertaForMaskedLM

from cluster.world import Solo
from stages.encoder import Encoder, EncoderConfig
from stages.methods.base import Batch
from stages.methods.functional import masked_token_loss
from stages.methods.wsscse import WSSCSE, WSSCSEConfig
from tests import oracles, tiny

ABLATIONS = [{}, {"weak_weight": 0.0}, {"masked": 0.0}, {"weak_weight": 0.0, "masked": 0.0}]
SEEDS = np.arange(100, 106, dtype=np.uint64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT with its masked-LM head."""
    return tiny.save_masked_lm(tmp_path_factory.mktemp("masked-lm"))


def learner(folder: str, dropout: float = 0.0, pooling: str = "cls", **options: Any) -> WSSCSE:
    torch.manual_seed(3)
    encoder = Encoder.load(folder, EncoderConfig(name=folder, pooling=pooling), dropout)
    return WSSCSEConfig(name="wsscse", **options).build(encoder).train()


def augmented(method: WSSCSE, rows: int = 6) -> Batch:
    return method.augment(tiny.batch(rows, seed=0), SEEDS[:rows], tiny.tokenizer())


def masks(method: WSSCSE, folder: str, batch: Batch) -> tuple[Tensor, list[tuple[np.ndarray, int]]]:
    """The weak sentences as transformers fills them, and the logits and token of each mask."""
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert batch.hidden is not None
    weak, found = batch.input_ids[6:].clone(), []
    with torch.no_grad():
        logits = model(input_ids=weak, attention_mask=batch.attention_mask[6:]).logits.double()
    for row, at in (batch.hidden[6:] != -100).nonzero().tolist():
        found.append((logits[row, at].numpy(), int(batch.hidden[6 + row, at])))
        weak[row, at] = 5 + int(logits[row, at, 5:].argmax())  # the first five are special
    return weak, found


@pytest.mark.parametrize("generator", ["shared", "own"])
@pytest.mark.parametrize("mlp", ["none", "train-only"])
def test_the_loss_is_the_papers_sum(folder: str, generator: str, mlp: str) -> None:
    method = learner(folder, generator=generator, mlp=mlp)
    batch = augmented(method)
    weak, wanted = masks(method, folder, batch)
    assert len(wanted) >= 3
    with torch.no_grad():
        sides = [
            method.encoder(ids, mask).embedding
            for ids, mask in zip((batch.input_ids[:6], weak), batch.attention_mask.split(6), strict=True)
        ]
        first, filled = (side if method.mlp is None else method.mlp(side) for side in sides)
    total = oracles.wsscse(*(side.double().numpy() for side in (first, first, filled)), wanted, 0.1)
    loss, metrics = method(batch, Solo())
    assert loss.item() == pytest.approx(total, rel=2e-5)
    right = sum(int(logits[5:].argmax()) + 5 == token for logits, token in wanted)
    assert metrics["mlm_accuracy"].item() == pytest.approx(right / len(wanted))
    parts = metrics["loss_instance"] + 0.1 * metrics["loss_weak"] + metrics["loss_mlm"]
    assert loss.item() == pytest.approx(parts.item(), rel=1e-6)


def test_the_masked_token_loss_is_that_of_transformers(folder: str) -> None:
    """With its gradients, as the peer's model computes them from labels of -100 where nothing is masked."""
    method = learner(folder, weak_weight=0.0)
    batch = augmented(method)
    peer = AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert batch.hidden is not None
    ids, mask, hidden = batch.input_ids[6:], batch.attention_mask[6:], batch.hidden[6:]
    wanted = peer(input_ids=ids, attention_mask=mask, labels=hidden).loss
    wanted.backward()
    assert method.generator is not None
    places = hidden != -100
    found = masked_token_loss(method.generator(method.encoder, ids, mask, places), hidden[places], places.sum())
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    theirs = {name.removeprefix("bert."): parameter.grad for name, parameter in peer.named_parameters()}
    for name, parameter in method.encoder.backbone.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=1e-6)


def test_gradients_of_the_masked_token_loss_are_finite_differences() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    tokens, count = torch.tensor([0, 3, 6, 3]), torch.tensor(2.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: masked_token_loss(x, tokens, count), logits)


def test_what_is_masked_is_a_copy_and_the_original_stays(folder: str) -> None:
    method = learner(folder, masked=0.5, repetition=0.9)
    plain, batch = tiny.batch(6, seed=0), augmented(method)
    width = plain.input_ids.shape[1]
    assert torch.equal(batch.input_ids[:6, :width], plain.input_ids)
    assert batch.hidden is not None
    masked = batch.hidden[6:] != -100
    assert torch.equal(masked, batch.input_ids[6:] == 4)
    copies = 0
    for weak, hidden, was in zip(batch.input_ids[6:], batch.hidden[6:], plain.input_ids, strict=True):
        restored = torch.where(hidden == -100, weak, hidden)[weak != 0]
        for at in (hidden != -100).nonzero()[:, 0].tolist():
            assert restored[at] == restored[at - 1]
        copies += len(restored) - int((was != 0).sum())
    assert 0 < masked.sum() < copies


def test_a_seed_a_row_decides_what_is_repeated_and_masked(folder: str) -> None:
    method = learner(folder)
    whole = augmented(method)
    for row in range(6):
        plain = tiny.batch(6, seed=0)
        one = Batch(plain.input_ids[row : row + 1], plain.attention_mask[row : row + 1])
        alone = method.augment(one, SEEDS[row : row + 1], tiny.tokenizer())
        length = int(alone.attention_mask[1].sum())
        assert int(whole.attention_mask[6 + row].sum()) == length
        assert torch.equal(whole.input_ids[6 + row, :length], alone.input_ids[1, :length])
    others = method.augment(tiny.batch(6, seed=0), SEEDS + 50, tiny.tokenizer())
    assert whole.input_ids.shape != others.input_ids.shape or not torch.equal(whole.input_ids, others.input_ids)


def test_sentences_as_long_as_the_encoder_allows_are_not_lengthened(folder: str) -> None:
    method = learner(folder, repetition=1.0)
    assert method.encoder.positions == 16
    ids = torch.tensor([[2, *range(5, 5 + words), 3] + [0] * (14 - words) for words in (14, 13, 9)])
    batch = method.augment(Batch(ids, (ids != 0).long()), np.arange(1, 4, dtype=np.uint64), tiny.tokenizer())
    assert batch.input_ids.shape[1] == 16
    lengths = batch.attention_mask[3:].sum(dim=1).tolist()
    assert lengths[0] == 16
    assert [batch.input_ids[3 + row, length - 1].item() for row, length in enumerate(lengths)] == [3, 3, 3]
    assert torch.isfinite(method(batch, Solo())[0])


@pytest.mark.parametrize("fill", ["argmax", "sampled"])
def test_no_special_token_is_filled_in(folder: str, fill: Any) -> None:
    generator = learner(folder).generator
    assert generator is not None
    logits = torch.zeros(50, len(tiny.VOCABULARY))
    logits[:, :5], logits[:, 9] = 100.0, 2.0
    chosen = generator.choose(logits, fill)
    assert chosen.min() >= 5
    assert (set(chosen.tolist()) == {9}) is (fill == "argmax")
    assert generator.choose(logits[:0], fill).tolist() == []


def test_without_augmentation_it_is_simcse(folder: str) -> None:
    method = learner(folder, weak_weight=0.0, masked=0.0)
    plain = tiny.batch(6, seed=0)
    assert method.augment(plain, SEEDS, tiny.tokenizer()) is plain
    assert method.generator is None
    with torch.no_grad():
        views = method.mlp(method.encoder(plain.input_ids, plain.attention_mask).embedding).double().numpy()  # type: ignore[misc]
    loss, metrics = method(plain, Solo())
    assert loss.item() == pytest.approx(oracles.info_nce(views, views, range(6), 0.05), rel=2e-5)
    assert not {"loss_weak", "loss_mlm"} & set(metrics)


def test_repetition_alone_has_the_repeated_sentence_as_weak_sample(folder: str) -> None:
    method = learner(folder, masked=0.0, mlp="none")
    batch = augmented(method)
    assert method.generator is None
    assert not (batch.input_ids == 4).any()
    with torch.no_grad():
        first, weak = method.encoder(batch.input_ids, batch.attention_mask).embedding.double().numpy().reshape(2, 6, -1)
    assert method(batch, Solo())[0].item() == pytest.approx(oracles.wsscse(first, first, weak, [], 0.1), rel=2e-5)


@pytest.mark.parametrize("generator", ["shared", "own"])
@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_every_parameter_takes_part_in_the_loss(folder: str, generator: str, options: dict[str, float]) -> None:
    method = learner(folder, 0.1, "layer-attention", generator=generator, **options)
    method(augmented(method), Solo())[0].backward()
    assert [name for name, parameter in method.named_parameters() if parameter.grad is None] == []


def test_a_batch_in_which_nothing_is_masked_has_finite_gradients_for_every_parameter(folder: str) -> None:
    for generator in ("shared", "own"):
        method = learner(folder, generator=generator)
        batch = method.augment(tiny.batch(1, seed=2), SEEDS[:1], tiny.tokenizer())
        assert batch.hidden is not None
        nothing = Batch(batch.input_ids, batch.attention_mask, hidden=torch.full_like(batch.hidden, -100))
        loss, metrics = method(nothing, Solo())
        loss.backward()
        assert metrics["loss_mlm"] == 0
        for name, parameter in method.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


def test_a_shared_generator_is_no_part_of_the_encoder_and_is_tied_to_its_embeddings(folder: str) -> None:
    method = learner(folder)
    assert method.generator is not None
    assert method.generator.head.predictions.decoder.weight is method.encoder.backbone.embeddings.word_embeddings.weight
    assert not any("generator" in name or "decoder" in name for name in method.encoder.state_dict())
    own = learner(folder, generator="own").generator
    assert own is not None
    assert own.head.predictions.decoder.weight is own.backbone.embeddings.word_embeddings.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("generator", ["shared", "own"])
def test_a_checkpoint_without_a_head_is_warned_of(tmp_path: Path, generator: str, caplog: pytest.LogCaptureFixture,
                                                  folder: str) -> None:  # fmt: skip
    learner(folder, generator=generator)
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        learner(tiny.save_bert(tmp_path), generator=generator)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} has no masked-LM head: the generator's starts at random and has to be learnt"
    ]


def test_a_roberta_has_its_head_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0,
                           intermediate_size=48, max_position_embeddings=17)  # fmt: skip
    peer = RobertaForMaskedLM(config)
    peer.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    method = learner(str(tmp_path))
    assert caplog.records == []
    assert method.encoder.positions == 16
    batch = augmented(method)
    assert batch.hidden is not None
    wanted = peer.eval()(batch.input_ids[6:], batch.attention_mask[6:], labels=batch.hidden[6:]).loss
    loss, metrics = method(batch, Solo())
    assert metrics["loss_mlm"].item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    assert [name for name, parameter in method.named_parameters() if parameter.grad is None] == []
