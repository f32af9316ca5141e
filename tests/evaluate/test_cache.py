"""Embeddings kept between evaluations: found by what the encoder is, never by what it is called."""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import ClusterConfig
from cluster.launch import map_tasks
from stages.evaluate import cache
from stages.evaluate import encode as encoding
from stages.evaluate.cache import encoder_key
from stages.evaluate.encode import EncodeTask, encode
from stages.evaluate.encoded import Encoded


@pytest.fixture
def encoded_sentences(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sentences that were really encoded, in this process or by Ray's."""
    seen: list[str] = []

    def counting(
        work: Callable[[EncodeTask], Encoded], tasks: Sequence[EncodeTask], cluster: ClusterConfig
    ) -> Iterator[Encoded]:
        seen.extend(text for task in tasks for text in task.sentences)
        return map_tasks(work, tasks, cluster)

    monkeypatch.setattr("stages.evaluate.encode.map_tasks", counting)
    return seen


def run(encoder: str, texts: list[str], kept: Path | None, poolings: tuple[str, ...] = ("cls", "mean")) -> Encoded:
    return encode(encoder, texts, poolings, 4, 24, ClusterConfig(), lambda done, total: None, kept)


def test_a_sentence_is_encoded_once_for_all_evaluations_of_an_encoder(
    tiny_bert: str, sentences: Callable[[int], list[str]], encoded_sentences: list[str], tmp_path: Path
) -> None:
    texts = sorted(set(sentences(30)))
    first = run(tiny_bert, texts[:20], tmp_path)
    assert sorted(encoded_sentences) == texts[:20]
    encoded_sentences.clear()
    both = run(tiny_bert, texts[10:], tmp_path)
    assert sorted(encoded_sentences) == texts[20:]
    np.testing.assert_array_equal(both.of("mean", texts[10:20]), first.of("mean", texts[10:20]))
    alone = run(tiny_bert, texts, None)
    for pooling in ("cls", "mean"):
        np.testing.assert_allclose(both.of(pooling, texts[10:]), alone.of(pooling, texts[10:]), atol=1e-5)
    np.testing.assert_allclose(
        both.layer_similarity[both.at(texts[10:])], alone.layer_similarity[alone.at(texts[10:])], atol=1e-5
    )
    np.testing.assert_array_equal(both.truncated[both.at(texts[10:])], alone.truncated[alone.at(texts[10:])])


def test_another_pooling_is_encoded_and_then_known(
    tiny_bert: str, encoded_sentences: list[str], tmp_path: Path
) -> None:
    run(tiny_bert, ["a dog", "two cat"], tmp_path, ("cls",))
    run(tiny_bert, ["a dog"], tmp_path, ("mean@0+3",))
    assert encoded_sentences == ["two cat", "a dog", "a dog"]
    run(tiny_bert, ["a dog"], tmp_path, ("mean@0+3", "cls"))
    assert encoded_sentences == ["two cat", "a dog", "a dog"]


def test_the_key_is_the_content_of_the_encoder_and_not_its_place(tiny_bert: str, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny_bert, copy)
    key = encoder_key(tiny_bert, 24, "cpu")
    assert encoder_key(str(copy), 24, "cpu") == key
    assert encoder_key(str(copy), 23, "cpu") != key
    assert encoder_key(str(copy), 24, "cuda") != key
    weights = load_file(copy / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] += torch.tensor(1e-3)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert encoder_key(str(copy), 24, "cpu") != key


def test_weights_that_are_written_over_are_loaded_anew(tiny_bert: str, tmp_path: Path) -> None:
    """Else the old weights' vectors would be kept as those of the new ones."""
    encoder, kept = tmp_path / "encoder", tmp_path / "kept"
    shutil.copytree(tiny_bert, encoder)
    before = run(str(encoder), ["a dog"], kept).of("cls", ["a dog"])
    weights = load_file(encoder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"] *= 2
    save_file(weights, encoder / "model.safetensors", {"format": "pt"})
    after = run(str(encoder), ["a dog"], kept).of("cls", ["a dog"])
    copy = tmp_path / "copy"
    shutil.copytree(encoder, copy)
    np.testing.assert_allclose(after, run(str(copy), ["a dog"], None).of("cls", ["a dog"]), atol=1e-6)
    assert np.abs(after - before).max() > 0.01


def test_what_was_encoded_before_a_run_broke_off_is_kept(
    tiny_bert: str, sentences: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = sorted(set(sentences(60)), key=lambda text: (-len(text), text))
    monkeypatch.setitem(encoding.BATCHES_PER_TASK, "cpu", 1)   # tasks of 4 sentences, files of 2 tasks
    monkeypatch.setattr(encoding, "TASKS_PER_FILE", 2)

    def interrupt(done: int, _total: int) -> None:
        if done >= 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(tiny_bert, texts, ("cls",), 4, 24, ClusterConfig(), interrupt, tmp_path)
    kept = cache.read(next(tmp_path.iterdir()), texts, ("cls",))
    assert list(kept.rows) == texts[:24]


def test_two_runs_may_keep_the_same_embeddings_at_the_same_time(tiny_bert: str, tmp_path: Path) -> None:
    encoded = run(tiny_bert, ["a dog", "two cat"], None)
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda _: cache.write(tmp_path, encoded), range(40)))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_passed_over_with_a_warning(
    tiny_bert: str, encoded_sentences: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny_bert, ["a dog", "two cat"], tmp_path)
    (file,) = tmp_path.glob("*/*.parquet")
    file.write_bytes(file.read_bytes()[:200])
    encoded_sentences.clear()
    with caplog.at_level(logging.WARNING):
        run(tiny_bert, ["a dog"], tmp_path)
    assert encoded_sentences == ["a dog"]
    assert "is damaged and was passed over" in caplog.text
