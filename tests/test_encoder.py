"""Encoders: layers as transformers gives them, poolings as their equations, files that others can read."""

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel

from cluster.errors import InputError
from stages.encoder import (
    Encoder,
    EncoderConfig,
    LayerAttention,
    LayerAttentionConfig,
    Layers,
    Pooling,
    load_tokenizer,
    masked_mean,
    max_positions,
)
from tests import oracles, tiny

POOLINGS = ("cls", "mean", "first-last-mean", "layer-attention", "cls@1", "mean@0+3")
RSN = get_args(LayerAttentionConfig.model_fields["rsn"].annotation)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("roberta")
    torch.manual_seed(0)
    RobertaModel(
        RobertaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=18, pad_token_id=1, initializer_range=0.2,
        )
    ).save_pretrained(folder)
    return str(folder)


def encode(encoder: Encoder, batch: tiny.Batch) -> torch.Tensor:
    with torch.no_grad():
        return encoder(batch.input_ids, batch.attention_mask).embedding


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_layers_are_the_hidden_states_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    encoder, batch = Encoder.load(request.getfixturevalue(kind)), tiny.batch(5, seed=0)
    with torch.no_grad():
        layers = encoder.layers(batch.input_ids, batch.attention_mask)
        states = encoder.backbone(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True
        ).hidden_states
    assert encoder.depth == 4
    assert len(states) == len(layers.cls) == len(layers.mean) == 5
    for layer, state in enumerate(states):
        torch.testing.assert_close(layers.cls[layer], state[:, 0], rtol=0, atol=1e-6)
        for row in range(5):
            tokens = state[row, : batch.attention_mask[row].sum()]
            torch.testing.assert_close(layers.mean[layer, row], tokens.mean(dim=0), rtol=0, atol=1e-6)


def test_layers_carry_the_gradients_of_the_hidden_states(bert: str) -> None:
    encoder, batch = Encoder.load(bert), tiny.batch(5, seed=0)
    encoder.layers(batch.input_ids, batch.attention_mask).cls[2].sum().backward()
    tapped = [parameter.grad for parameter in encoder.backbone.parameters()]
    encoder.zero_grad()
    states = encoder.backbone(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True
    ).hidden_states
    states[2][:, 0].sum().backward()
    for found, parameter in zip(tapped, encoder.backbone.parameters(), strict=True):
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_changes_no_embedding(pooling: Pooling) -> None:
    encoder, batch = tiny.encoder(pooling).double().eval(), tiny.batch(6, seed=0)      # no rounding of its own
    together = encode(encoder, batch)
    assert together.dtype == torch.float32
    for row in range(6):
        length = int(batch.attention_mask[row].sum())
        alone = encode(encoder, tiny.Batch(batch.input_ids[[row], :length], batch.attention_mask[[row], :length]))
        torch.testing.assert_close(together[[row]], alone, rtol=0, atol=1e-6)


def test_simple_poolings_are_of_the_last_layer_and_of_the_first_above_the_embeddings() -> None:
    encoder, batch = tiny.encoder("cls").eval(), tiny.batch(6, seed=0)
    with torch.no_grad():
        layers = encoder.layers(batch.input_ids, batch.attention_mask)
    assert torch.equal(encoder.pool(layers, "cls"), layers.cls[4])
    assert torch.equal(encoder.pool(layers, "mean"), layers.mean[4])
    assert torch.equal(encoder.pool(layers, "first-last-mean"), (layers.mean[1] + layers.mean[4]) / 2)
    assert torch.equal(encoder.pool(layers), layers.cls[4])
    assert torch.equal(encoder.pool(layers, "cls@2"), layers.cls[2])
    assert torch.equal(encoder.pool(layers, "mean@0"), layers.mean[0])
    assert torch.equal(encoder.pool(layers, "mean@1+4"), encoder.pool(layers, "first-last-mean"))
    with pytest.raises(InputError, match=r"mean@5: .* has layers 0 \(embeddings\) to 4"):
        encoder.pool(layers, "mean@5")
    with pytest.raises(InputError, match="no layer-attention pooling"):
        encoder.pool(layers, "layer-attention")
    with pytest.raises(InputError, match="'max' is unknown; it may be cls, mean"):
        encoder.pool(layers, "max")


def test_a_mean_takes_no_padding_and_survives_an_empty_mask() -> None:
    states = torch.randn(2, 3, 4)
    means = masked_mean(states, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    torch.testing.assert_close(means[0], states[0, :2].mean(dim=0))
    assert torch.equal(means[1], torch.zeros(4))


def random_layers(depth: int = 4, sentences: int = 3, hidden: int = 8) -> Layers:
    random = np.random.default_rng(0)
    cls, mean = random.normal(size=(2, depth + 1, sentences, hidden))
    return Layers(torch.from_numpy(cls), torch.from_numpy(mean))


def from_loops(pooling: LayerAttention, layers: Layers) -> np.ndarray:
    weights = {name: value.detach().numpy() for name, value in pooling.named_parameters()}
    return np.stack([
        oracles.layer_attention(weights, cls, mean, pooling.config.queries, pooling.config.rsn)
        for cls, mean in zip(layers.cls.transpose(0, 1).numpy(), layers.mean.transpose(0, 1).numpy(), strict=True)
    ])


@pytest.mark.parametrize("rsn", RSN)
@pytest.mark.parametrize("queries", ["sum", "mean"])
@pytest.mark.parametrize("start", [{"init": "random"}, {"sharpness": 3.0}, {"sharpness": 0.0}], ids=str)
def test_layer_attention_is_equations_2_to_7(rsn: Any, queries: Any, start: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pooling = LayerAttention(8, LayerAttentionConfig(rsn=rsn, queries=queries, **start)).double()
    layers = random_layers()
    np.testing.assert_allclose(pooling(layers).detach().numpy(), from_loops(pooling, layers), rtol=1e-12)


def test_the_embedding_layer_takes_no_part_in_layer_attention() -> None:
    pooling = LayerAttention(8, LayerAttentionConfig(init="random")).double()
    layers = random_layers()
    before = pooling(layers)
    layers.cls[0], layers.mean[0] = torch.nan, torch.nan
    assert torch.equal(pooling(layers), before)


@pytest.mark.parametrize("rsn", RSN)
@pytest.mark.parametrize("queries", ["sum", "mean"])
def test_layer_attention_starts_from_what_its_residual_path_passes(rsn: str, queries: Any) -> None:
    """Identity projections: outputs are plain attention of [CLS] over the means, and the tanh adds nothing."""
    pooling = LayerAttention(8, LayerAttentionConfig(rsn=rsn, queries=queries, sharpness=3.0)).double()
    layers = random_layers()
    for sentence, found in enumerate(pooling(layers).detach().numpy()):
        cls, mean = layers.cls[1:, sentence].numpy(), layers.mean[1:, sentence].numpy()
        attention = [oracles.softmax([3.0 * float(query @ key) / 8**0.5 for key in mean]) for query in cls]
        outputs = np.array(attention) @ mean
        pooled = outputs.sum(axis=0) if queries == "sum" else outputs.mean(axis=0)
        wanted = {
            "top_tanh": outputs[-1],
            "layers_tanh": outputs.mean(axis=0),
            "cls_tanh": cls[-1],
            "both_tanh": cls[-1] + outputs.mean(axis=0),
            "proj_tanh": pooled,
        }
        np.testing.assert_allclose(found, wanted[rsn], atol=1e-6)  # the start is set in float32


def test_without_sharpness_layer_attention_starts_near_the_mean_of_all_layers() -> None:
    torch.manual_seed(0)
    pooling = LayerAttention(8, LayerAttentionConfig(rsn="layers_tanh", sharpness=0.0)).double()
    layers = random_layers()
    torch.testing.assert_close(pooling(layers), layers.mean[1:].mean(dim=0), rtol=0, atol=0.02)


@pytest.mark.parametrize("head", ["none", "mlp"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_saved_encoder_comes_back_with_its_pooling_and_head(
    pooling: Pooling, head: Any, bert: str, tmp_path: Path
) -> None:
    layer_attention = LayerAttentionConfig(init="random", queries="sum", rsn="proj_tanh")
    torch.manual_seed(1)
    config = EncoderConfig(name=bert, pooling=pooling, layer_attention=layer_attention, head=head)
    encoder = Encoder.load(bert, config)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.05 * torch.randn_like(parameter)    # as trained weights differ from the start's
    encoder.save(tmp_path / "saved", load_tokenizer(bert))
    again = Encoder.load(str(tmp_path / "saved"))
    assert again.config == encoder.config
    assert not again.training
    batch = tiny.batch(6, seed=0)
    torch.testing.assert_close(encode(again, batch), encode(encoder, batch), rtol=0, atol=1e-6)
    text = "word1 word2 word40"
    assert load_tokenizer(str(tmp_path / "saved"))(text)["input_ids"] == load_tokenizer(bert)(text)["input_ids"]


def test_the_weights_that_an_engine_hands_over_are_saved_in_place_of_the_modules_own(
    bert: str, tmp_path: Path
) -> None:
    encoder = Encoder.load(bert, EncoderConfig(name=bert, pooling="layer-attention"))
    doubled = {name: 2 * value for name, value in encoder.state_dict().items()}
    encoder.save(tmp_path / "saved", load_tokenizer(bert), doubled)
    for name, value in Encoder.load(str(tmp_path / "saved")).state_dict().items():
        torch.testing.assert_close(value, doubled[name], rtol=0, atol=0)


def test_layer_attention_weights_under_another_residual_network_are_refused(bert: str, tmp_path: Path) -> None:
    Encoder.load(bert, EncoderConfig(name=bert)).save(tmp_path / "saved", load_tokenizer(bert))
    other = EncoderConfig(name=bert, layer_attention=LayerAttentionConfig(rsn="cls_tanh"))
    with pytest.raises(InputError, match=r"was saved with layer_attention\.rsn=top_tanh, not cls_tanh"):
        Encoder.load(str(tmp_path / "saved"), other)


def test_a_saved_head_is_not_dropped_in_silence(bert: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    headed = Encoder.load(bert, EncoderConfig(name=bert, pooling="cls", head="mlp"))
    headed.save(Path(saved), load_tokenizer(bert))
    with pytest.raises(InputError, match=r"was saved with a head; set encoder\.head=mlp"):
        Encoder.load(saved, EncoderConfig(name=saved, pooling="cls"))
    assert Encoder.load(saved, EncoderConfig(name=saved, pooling="cls", head="mlp")).head is not None


def test_a_head_is_for_the_encoders_own_pooling_alone(bert: str) -> None:
    plain, headed = (Encoder.load(bert, EncoderConfig(name=bert, pooling="cls", head=head)) for head in ("none", "mlp"))
    batch = tiny.batch(6, seed=0)
    layers = headed.layers(batch.input_ids, batch.attention_mask)
    assert headed.head is not None
    wanted = torch.tanh(layers.cls[-1] @ headed.head.dense.weight.T + headed.head.dense.bias)
    torch.testing.assert_close(headed(batch.input_ids, batch.attention_mask).embedding, wanted)
    torch.testing.assert_close(headed.pool(layers, "mean"), plain.pool(layers, "mean"))


@pytest.mark.parametrize("head", ["none", "mlp"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_sentence_transformers_loads_it_and_embeds_alike(
    pooling: Pooling, head: Any, bert: str, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = Encoder.load(bert, EncoderConfig(name=bert, pooling=pooling, head=head))
    tokenizer = load_tokenizer(bert)
    encoder.save(tmp_path / "saved", tokenizer)
    texts = ["word1 word2", "word3 word4 word5 word6", "word7"]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    ours = encode(encoder, tiny.Batch(tokens["input_ids"], tokens["attention_mask"]))
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    np.testing.assert_allclose(theirs, ours.numpy(), atol=1e-6)


def test_dropout_is_as_asked_for_and_acts_in_training_alone(bert: str) -> None:
    batch = tiny.batch(4, seed=0)
    encoder = Encoder.load(bert, dropout=0.5).train()
    assert not torch.equal(encode(encoder, batch), encode(encoder, batch))
    assert torch.equal(encode(encoder.eval(), batch), encode(encoder, batch))
    without = Encoder.load(bert, dropout=0.0).train()
    assert torch.equal(encode(without, batch), encode(encoder, batch))


def test_every_parameter_of_a_loaded_encoder_is_used(bert: str) -> None:
    encoder, batch = Encoder.load(bert, EncoderConfig(name=bert, pooling="cls")), tiny.batch(4, seed=0)
    encoder(batch.input_ids, batch.attention_mask).embedding.sum().backward()
    assert [name for name, parameter in encoder.named_parameters() if parameter.grad is None] == []


def test_a_roberta_has_fewer_positions_than_its_table(bert: str, roberta: str) -> None:
    assert max_positions(bert) == 16
    assert max_positions(roberta) == 16                        # of 18: two stand before the first token
    encoder = Encoder.load(roberta)
    ids = torch.full((1, 16), 5)
    encoder(ids, torch.ones_like(ids))
    with pytest.raises((IndexError, RuntimeError)):
        encoder(torch.full((1, 17), 5), torch.ones(1, 17, dtype=torch.long))


def test_what_is_no_bert_is_refused(tmp_path: Path) -> None:
    DistilBertModel(DistilBertConfig(vocab_size=64, dim=32, n_layers=3, n_heads=4, hidden_dim=48)).save_pretrained(
        tmp_path
    )
    with pytest.raises(InputError, match="is a distilbert; use a BERT or RoBERTa encoder"):
        Encoder.load(str(tmp_path))


@pytest.mark.parametrize("name", ["no/such-model", "/no/such/folder"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="it may be a local folder, a hub name or all-MiniLM-L6-v2"):
        Encoder.load(name)


def test_the_packaged_encoder_needs_no_hub() -> None:
    encoder = Encoder.load("all-MiniLM-L6-v2")
    assert (encoder.depth, encoder.dimension, encoder.config.pooling) == (6, 384, "mean")


def test_a_checkpoint_in_half_precision_is_loaded_in_float32(bert: str, tmp_path: Path) -> None:
    BertModel.from_pretrained(bert, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in Encoder.load(str(tmp_path)).parameters()} == {torch.float32}


def test_a_folder_without_tokenizer_or_with_missing_weights_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    two_layers = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    BertModel(two_layers, add_pooling_layer=False).save_pretrained(folder)
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"weights that it does not have, such as encoder\.layer\.2"):
        Encoder.load(str(folder))
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(InputError, match="weights cannot be loaded"):
        Encoder.load(str(folder))
