import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr

from cluster.errors import InputError
from stages.artifacts import Corpus, TrainedEncoder
from stages.context import Context
from stages.encoder import Encoder, EncoderConfig, load_tokenizer
from stages.evaluate.config import STS_TASKS, EvaluateConfig
from stages.evaluate.evaluate import EvaluateJob, evaluate, sts_scores
from stages.evaluate.sts import ScoredPairs, load_pairs

AGGREGATES = {"n", "spearman", "pearson", "spearman_mean", "pearson_mean", "spearman_wmean", "pearson_wmean", "subsets"}

GEOMETRY = {"alignment", "uniformity", "anisotropy", "variance_share", "layer_similarity", "over"}


def score(encoder: str, out: Path, poolings: tuple[str, ...] = ("cls", "mean"), **options: object) -> dict[str, dict]:
    job = EvaluateJob(evaluate=EvaluateConfig.model_validate(options), encoder=encoder, poolings=poolings)
    scores = evaluate(job, context=Context(out))
    return json.loads((scores.folder / "scores.json").read_text())


def test_aggregates_are_those_of_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    sizes = {"short": 5, "long": 40, "middle": 11}
    names = tuple(name for name, size in sizes.items() for _ in range(size))
    gold, cosines = random.integers(0, 6, len(names)) * 1.0, random.normal(size=len(names))
    found = sts_scores(ScoredPairs(names, names, gold, names), cosines)

    of_subset = []
    for name, size in sizes.items():
        rows = [row for row, subset in enumerate(names) if subset == name]
        of_subset.append((100 * spearmanr(cosines[rows], gold[rows]).statistic, size))
    assert found["spearman"] == pytest.approx(100 * spearmanr(cosines, gold).statistic)
    assert found["spearman_mean"] == pytest.approx(sum(value for value, _ in of_subset) / 3)
    assert found["spearman_wmean"] == pytest.approx(sum(value * size for value, size in of_subset) / len(names))
    assert [subset["n"] for subset in found["subsets"].values()] == [5, 40, 11]
    assert found["spearman"] != pytest.approx(found["spearman_mean"])


def test_the_graded_sample_is_scored_by_genre(tiny_bert: str, tmp_path: Path) -> None:
    scores = score(tiny_bert, tmp_path, max_length=24)
    assert list(scores) == ["cls", "mean"]
    sample = scores["mean"]["sts"]["graded-sample"]
    test = load_pairs(None, "graded-sample")
    assert set(sample) == AGGREGATES
    assert sample["n"] == len(test.gold)
    assert set(sample["subsets"]) == set(test.subsets)
    assert scores["mean"]["sts"]["avg_spearman"] == sample["spearman"]
    assert scores["mean"]["n_sentences"] == len(set(test.sentences))
    assert len(scores["mean"]["geometry"]["layer_similarity"]) == 3 + 1


def test_a_senteval_folder_is_scored_on_all_seven_tests(tiny_bert: str, senteval: Path, tmp_path: Path) -> None:
    scores = score(tiny_bert, tmp_path, data=str(senteval), allow_partial=True)
    for of_pooling in scores.values():
        sts = of_pooling["sts"]
        assert list(sts) == [*STS_TASKS, "avg_spearman"]
        assert sts["avg_spearman"] == pytest.approx(sum(sts[task]["spearman"] for task in STS_TASKS) / 7)
        assert list(sts["STS-B"]["subsets"]) == ["test"]
        assert sts["STS-B"]["spearman_mean"] == pytest.approx(sts["STS-B"]["spearman"])
        assert set(of_pooling["geometry"]) == GEOMETRY
        assert len(of_pooling["warnings"]) == 26
    assert scores["cls"]["geometry"]["layer_similarity"] == scores["mean"]["geometry"]["layer_similarity"]


def test_cosines_are_left_beside_the_scores(tiny_bert: str, senteval: Path, tmp_path: Path) -> None:
    scores = score(tiny_bert, tmp_path, data=str(senteval), allow_partial=True, sts=["STS16", "SICK-R"])
    rows = pq.read_table(tmp_path / "pairs-cls.parquet").to_pylist()
    by_task = defaultdict(list)
    for row in rows:
        by_task[row["task"]].append((row["cosine"], row["gold"]))
    assert {task: len(pairs) for task, pairs in by_task.items()} == {"STS16": 30, "SICK-R": 6}
    for task, pairs in by_task.items():
        assert 100 * spearmanr(pairs).statistic == pytest.approx(scores["cls"]["sts"][task]["spearman"])
    assert scores["cls"]["geometry"]["over"] == "STS16"


def test_the_trained_encoder_is_scored_where_no_other_is_named(tiny_bert: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "trained" / "encoder")
    (tmp_path / "out").mkdir()
    job = EvaluateJob(evaluate=EvaluateConfig(max_length=24), encoder=None, poolings=("mean",))
    evaluate(job, TrainedEncoder(tmp_path / "trained", 1, None), context=Context(tmp_path / "out"))
    trained = json.loads((tmp_path / "out/scores.json").read_text())
    assert trained == score(tiny_bert, tmp_path, ("mean",), max_length=24)


def test_transfer_tasks_and_other_pairs_are_scored_beside_sts(
    tiny_bert: str, transfer: Path, tmp_path: Path
) -> None:
    texts = load_pairs(str(transfer), "STS16").first
    lines = [f"{text}\t{text if row % 2 else texts[row - 1]}\t{row % 2}\n" for row, text in enumerate(texts)]
    (tmp_path / "binary.tsv").write_text("".join(lines[10:]))
    (tmp_path / "valid.tsv").write_text("".join(lines[:10]))
    binary = {"name": "alike", "path": str(tmp_path / "binary.tsv"), "columns": [0, 1, 2]}
    scores = score(
        tiny_bert, tmp_path, ("mean",), data=str(transfer), allow_partial=True, protocol="fast", sts=["STS16"],
        transfer=["MRPC", "SUBJ"], similarity=[binary | {"validation": str(tmp_path / "valid.tsv")}],
    )["mean"]  # fmt: skip
    assert list(scores["transfer"]) == ["SUBJ", "MRPC", "avg_accuracy"]
    subj, mrpc = scores["transfer"]["SUBJ"], scores["transfer"]["MRPC"]
    assert (subj["n_train"], mrpc["n_train"], mrpc["n_test"]) == (24, 24, 24)
    assert subj["test_accuracy"] > 80
    assert mrpc["f1"] > 80
    assert "5" in subj["protocol"]
    assert scores["transfer"]["avg_accuracy"] == (subj["test_accuracy"] + mrpc["test_accuracy"]) / 2
    assert scores["similarity"]["alike"]["accuracy"] == 100
    assert scores["similarity"]["alike"]["average_precision"] == pytest.approx(100)
    assert scores["sts"]["avg_spearman"] == scores["sts"]["STS16"]["spearman"]
    assert set(pq.read_table(tmp_path / "pairs-mean.parquet")["task"].to_pylist()) == {"STS16", "alike"}
    assert len([text for text in scores["warnings"] if "SUBJ" in text or "MRPC" in text]) == 4
    assert not (tmp_path / "features").exists()


def test_whitening_is_fitted_on_each_task_or_on_the_corpus_and_said(
    tiny_bert: str, sentences: Callable[[int], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    pq.write_table(pa.table({"text": [*sentences(60), "a dog"]}), tmp_path / "corpus/part-0.parquet")
    found = {}
    for name, whitening in {
        "none": None,
        "evaluation": {"dimensions": 8},
        "corpus": {"fit": "corpus", "dimensions": 8, "sentences": 50},
    }.items():
        config = EvaluateConfig(max_length=24, whitening=whitening)
        job = EvaluateJob(evaluate=config, encoder=tiny_bert, poolings=("mean",))
        evaluate(job, Corpus(tmp_path / "corpus", 61), context=Context(tmp_path))
        found[name] = json.loads((tmp_path / "scores.json").read_text())["mean"]
    shares = {name: scores["geometry"]["variance_share"]["1"] for name, scores in found.items()}
    assert shares["evaluation"] < 0.3 < shares["none"]
    assert len({scores["sts"]["avg_spearman"] for scores in found.values()}) == 3
    assert found["none"]["notes"] == []
    assert "fitted on each task's own test sentences" in found["evaluation"]["notes"][0]
    assert "(8 dimensions), fitted on 50 sentences of the corpus" in found["corpus"]["notes"][0]


def test_sentences_that_are_in_the_corpus_too_are_counted(tiny_bert: str, tmp_path: Path) -> None:
    known = load_pairs(None, "graded-sample").first[:2]
    (tmp_path / "corpus").mkdir()
    pq.write_table(
        pa.table({"text": [known[0].upper() + " !", known[1], "Something else."]}), tmp_path / "corpus/part-0.parquet"
    )
    job = EvaluateJob(evaluate=EvaluateConfig(max_length=24), encoder=tiny_bert, poolings=("mean",))
    evaluate(job, Corpus(tmp_path / "corpus", 3), context=Context(tmp_path))
    scores = json.loads((tmp_path / "scores.json").read_text())["mean"]
    assert scores["corpus_overlap"] == {"graded-sample": 2}
    assert scores["notes"] == ["2 sentences of graded-sample are in the corpus, too."]


def test_cut_sentences_are_counted(tiny_bert: str, tmp_path: Path) -> None:
    few, many = (score(tiny_bert, tmp_path, max_length=length)["cls"]["n_truncated"] for length in (24, 8))
    assert 0 <= few < many


def test_no_similarity_task_leaves_empty_scores(tiny_bert: str, transfer: Path, tmp_path: Path) -> None:
    options = {"data": str(transfer), "transfer": ["SUBJ"], "protocol": "fast", "allow_partial": True}
    assert score(tiny_bert, tmp_path, ("cls",), sts="none", **options)["cls"]["sts"] == {"avg_spearman": None}


def test_a_length_above_the_encoders_positions_is_refused(tiny_bert: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluate\.max_length=25 is above the 24 positions"):
        score(tiny_bert, tmp_path, max_length=25)


def test_an_encoder_that_says_the_same_of_everything_is_an_error_not_a_score(tiny_bert: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_bert, tmp_path / "constant")
    weights = load_file(tmp_path / "constant/model.safetensors")
    last = "encoder.layer.2.output.LayerNorm"
    weights[f"{last}.weight"] = torch.zeros(16)
    weights[f"{last}.bias"] = torch.ones(16)
    save_file(weights, tmp_path / "constant/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"graded-sample, cls pooling: subset \w+: all \d+ cosines are 1\.0"):
        score(str(tmp_path / "constant"), tmp_path)
    assert not (tmp_path / "scores.json").exists()


def test_an_encoder_is_scored_by_the_similarity_that_it_learnt_under_its_own_pooling(
    tiny_bert: str, tmp_path: Path
) -> None:
    config = EncoderConfig(name=tiny_bert, pooling="mean", similarity="manhattan")
    Encoder.load(tiny_bert, config).save(tmp_path / "encoder", load_tokenizer(tiny_bert))
    (tmp_path / "out").mkdir()
    scores = score(str(tmp_path / "encoder"), tmp_path / "out", ("cls", "mean"), max_length=24)
    test, encoder, tokenizer = load_pairs(None, "graded-sample"), Encoder.load(tiny_bert), load_tokenizer(tiny_bert)

    def embed(text: str, pooling: str) -> np.ndarray:
        tokens = tokenizer(text, truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            layers = encoder.layers(tokens["input_ids"], tokens["attention_mask"])
            return encoder.pool(layers, pooling)[0].double().numpy()

    distances = [
        np.abs(embed(u, "mean") - embed(v, "mean")).mean() for u, v in zip(test.first, test.second, strict=True)
    ]
    found = pq.read_table(tmp_path / "out/pairs-mean.parquet")["cosine"].to_numpy()
    np.testing.assert_allclose(found, np.exp(-np.array(distances)), atol=1e-5)
    assert "exp(-mean |u - v|)" in scores["mean"]["notes"][-1]
    assert scores["cls"]["notes"] == []
    (tmp_path / "plain").mkdir()
    plain = score(tiny_bert, tmp_path / "plain", ("cls",), max_length=24)
    assert plain["cls"]["sts"] == scores["cls"]["sts"]
