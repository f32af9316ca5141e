import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import ClusterConfig
from cluster.errors import InputError
from stages.encoder import Encoder, load_tokenizer
from stages.evaluate import encode as encoding
from stages.evaluate.encode import embed, encode
from stages.evaluate.encoded import Encoded

POOLINGS = ("cls", "mean", "first-last-mean")


def run(encoder: str, sentences: list[str], batch_size: int = 4, max_length: int = 24) -> Encoded:
    return encode(encoder, sentences, POOLINGS, batch_size, max_length, ClusterConfig(), lambda done, total: None)


def test_each_sentence_gets_what_it_gets_alone(tiny_bert: str, sentences: Callable[[int], list[str]]) -> None:
    texts = sentences(40)
    encoded = run(tiny_bert, texts)
    encoder, tokenizer = Encoder.load(tiny_bert), load_tokenizer(tiny_bert)
    for text in texts:
        tokens = tokenizer([text], return_tensors="pt")
        with torch.no_grad():
            layers = encoder.layers(tokens["input_ids"], tokens["attention_mask"])
        for pooling in POOLINGS:
            alone = encoder.pool(layers, pooling).numpy()
            np.testing.assert_allclose(encoded.of(pooling, [text]), alone, atol=1e-5)
        curve = [torch.cosine_similarity(layer[0], layers.cls[-1, 0], dim=0).item() for layer in layers.cls]
        np.testing.assert_allclose(encoded.layer_similarity[encoded.at([text])[0]], curve, atol=1e-5)


def test_each_distinct_sentence_is_encoded_once(tiny_bert: str) -> None:
    done: list[tuple[int, int]] = []
    encoded = encode(
        tiny_bert, ["a dog", "the cat", "a dog"], POOLINGS, 1, 24, ClusterConfig(), lambda *step: done.append(step)
    )
    assert encoded.vectors["cls"].shape == (2, 16)
    assert done == [(0, 2), (2, 2)]


def test_the_order_of_the_sentences_changes_nothing(tiny_bert: str, sentences: Callable[[int], list[str]]) -> None:
    texts = sentences(60)
    one, other = run(tiny_bert, texts), run(tiny_bert, texts[::-1])
    for pooling in POOLINGS:
        np.testing.assert_array_equal(one.of(pooling, texts), other.of(pooling, texts))


@pytest.mark.cluster
def test_two_workers_give_what_one_process_gives(
    tiny_bert: str, sentences: Callable[[int], list[str]], ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = sentences(200)
    there = run(tiny_bert, texts)
    monkeypatch.setattr(encoding, "map_tasks", lambda function, tasks, cluster: map(function, tasks))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                                   # as in a worker: sums of other threads round otherwise
    here = run(tiny_bert, texts)
    torch.set_num_threads(threads)
    for pooling in POOLINGS:
        np.testing.assert_allclose(there.of(pooling, texts), here.of(pooling, texts), atol=1e-6)


def test_longer_sentences_are_cut_and_counted(tiny_bert: str) -> None:
    encoded = run(tiny_bert, ["a the man woman dog", "a the man", "a the man woman"], max_length=5)
    assert encoded.truncated[encoded.at(["a the man woman dog", "a the man woman", "a the man"])].tolist() == [1, 1, 0]
    np.testing.assert_allclose(
        encoded.of("mean", ["a the man woman dog"]), encoded.of("mean", ["a the man"]), atol=1e-5
    )


def test_an_encoder_in_training_is_scored_without_dropout_and_goes_on_training(tiny_bert: str) -> None:
    encoder, tokenizer = Encoder.load(tiny_bert).train(), load_tokenizer(tiny_bert)
    first, second = (embed(encoder, tokenizer, ["a dog runs"], ["mean"], 4, 24).vectors["mean"] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert encoder.training


def test_nan_embeddings_are_an_error_that_names_a_sentence(tiny_bert: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "broken")
    weights = load_file(tmp_path / "broken/model.safetensors")
    word = load_tokenizer(tiny_bert)("guitar")["input_ids"][1]
    weights["embeddings.word_embeddings.weight"][word] = torch.nan
    save_file(weights, tmp_path / "broken/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"cls embedding of .*NaN or infinite numbers for 1 of 2 .* 'the guitar'"):
        run(str(tmp_path / "broken"), ["a dog", "the guitar"])


def test_nothing_to_encode_is_no_error(tiny_bert: str) -> None:
    assert run(tiny_bert, []).rows == {}
