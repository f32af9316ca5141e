"""IS-CSE, ClusterNS, RankCSE and ArcCSE: against loops over their papers, and over several workers."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from cluster.errors import InputError
from cluster.world import Solo, World
from pipeline.config import Config
from pipeline.graph import graph
from stages.encoder import Encoder, EncoderConfig
from stages.methods import clusters, functional, listwise
from stages.methods.base import Batch, Method
from stages.methods.registry import MethodConfig
from tests import oracles, tiny
from tests.processes import in_processes

BATCH = 6
DEGREES = 10.0
CLUSTERS = {"clusters": 3, "start_cosine": 1.0, "momentum": 0.1, "margin_weight": 0.5, "alpha": 0.1, "beta": 0.2}
QUEUE = {"queue_length": 14, "neighbours": 4, "alpha": 0.3}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two encoders of other depths, with the tests' vocabulary."""
    return tuple(  # type: ignore[return-value]
        tiny.save_bert(tmp_path_factory.mktemp("teacher"), depth) for depth in (2, 3)
    )


@pytest.fixture(scope="module")
def names(teachers: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """Every method of this file, with settings for tiny batches."""
    return {
        "is-cse": QUEUE,
        "cluster-ns": CLUSTERS,
        "rankcse": {"teacher": teachers[0], "second_teacher": teachers[1]},
        "arccse": {},
    }


def method(name: str, pooling: str = "cls", dropout: float = 0.1, **options: Any) -> Any:
    settings: Any = TypeAdapter(MethodConfig).validate_python({"name": name, **options})
    return settings.build(tiny.encoder(pooling, dropout))


def vectors(*shape: int, seed: int = 0, unit: bool = True) -> Tensor:
    """Random float64."""
    made = torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))
    return F.normalize(made, dim=-1) if unit else made


def two_views(learner: Method, batch: Batch, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What a step with this seed compares: dropout is drawn in the same order."""
    torch.manual_seed(seed)
    with torch.no_grad():
        views = learner.encoder(batch.input_ids.repeat(2, 1), batch.attention_mask.repeat(2, 1)).embedding
        if learner.mlp is not None:                            # type: ignore[truthy-function]
            views = torch.tanh(learner.mlp.dense(views))       # type: ignore[operator, union-attr]
    first, second = views.double().numpy().reshape(2, len(batch.input_ids), -1)
    torch.manual_seed(seed)
    return first, second


# IS-CSE


@pytest.mark.parametrize("mlp", ["none", "train-only"])
def test_iscse_adds_the_smoothed_loss_when_its_queue_is_full(mlp: str) -> None:
    learner = method("is-cse", mlp=mlp, **QUEUE)
    oracle = oracles.APINCSE(
        **learner.config.model_dump(), instance_weight=1, augmented_weight=0.3, negative_weight=0,
        queue_warmup="full", include_self=False, anchor_norm="unit",
    )  # fmt: skip
    for step in range(5):
        batch = tiny.batch(BATCH, seed=step)
        first, second = two_views(learner, batch, step)
        wanted, parts = oracle.loss(first, second, [])
        loss, metrics = learner(batch, Solo())
        assert loss.item() == pytest.approx(wanted, rel=2e-5)
        found = {name: metrics[name].item() for name in metrics if name.startswith("loss_")}
        assert found == pytest.approx(parts, rel=2e-5)
        assert ("loss_augmented" in found) == (step >= 2)


def test_alpha_is_constant_or_rises_along_half_a_cosine_until_the_middle_of_training() -> None:
    constant, cosine = (method("is-cse", schedule=schedule, **QUEUE).config for schedule in ("constant", "cosine"))
    assert [constant.weight(done) for done in (0, 0.5, 0.99)] == [0.3] * 3
    assert [cosine.weight(done) for done in (0, 0.5, 0.7, 0.99)] == pytest.approx([0.005, 0.05, 0.05, 0.05])
    assert cosine.weight(1 / 3) == pytest.approx((0.005 + 0.05) / 2)


def test_iscse_weighs_a_step_by_how_far_training_has_come() -> None:
    learner = method("is-cse", schedule="cosine", queue_length=6, neighbours=2)
    alphas = [learner(replace(tiny.batch(BATCH, 0), done=done), Solo())[1]["alpha"].item() for done in (0.0, 0.25, 0.5)]
    assert alphas == pytest.approx([learner.config.weight(done) for done in (0.0, 0.25, 0.5)])


# ArcCSE


def test_the_angular_margin_is_added_to_the_positives_angle() -> None:
    anchors, candidates, targets = vectors(4, 5), vectors(9, 5), torch.tensor([3, 0, 8, 3])
    found = functional.angular_margin_info_nce(anchors, candidates, targets, 0.05, math.radians(DEGREES))
    wanted = oracles.angular_margin_info_nce(anchors.numpy(), candidates.numpy(), targets.tolist(), 0.05, DEGREES)
    assert found.item() == pytest.approx(wanted, rel=1e-12)


def test_without_a_margin_arccse_is_simcse() -> None:
    batch, losses = tiny.batch(BATCH, seed=0), []
    for name, options in (("arccse", {"margin": 0.0}), ("simcse", {})):
        learner = method(name, **options)
        torch.manual_seed(3)
        losses.append(learner(batch, Solo())[0].item())
    assert losses[0] == losses[1]


def test_arccse_is_the_loss_of_two_views() -> None:
    learner, batch = method("arccse"), tiny.batch(BATCH, seed=0)
    first, second = two_views(learner, batch, 1)
    wanted = oracles.angular_margin_info_nce(first, second, range(BATCH), 0.05, DEGREES)
    assert learner(batch, Solo())[0].item() == pytest.approx(wanted, rel=2e-5)


# ClusterNS


@pytest.mark.parametrize(
    "options",
    [{}, {"negative_weight": 0.0}, {"negative_weight": 0.3, "alpha": 0.0}, {"clusters": 6, "momentum": 1.0},
     {"start_cosine": 0.0}],
    ids=str,
)  # fmt: skip
def test_clusterns_is_a_contrast_with_centroids_and_a_margin_within_clusters(options: dict[str, Any]) -> None:
    learner = method("cluster-ns", **CLUSTERS | options)
    oracle = oracles.ClusterNS(**learner.config.model_dump())
    for step in range(3):
        batch = tiny.batch(BATCH, seed=step)
        first, second = two_views(learner, batch, step)
        wanted, parts = oracle.loss(first, second)
        loss, metrics = learner(batch, Solo())
        assert loss.item() == pytest.approx(wanted, rel=2e-5)
        found = {name: metrics[name].item() for name in metrics if name.startswith("loss_")}
        assert found == pytest.approx(parts, rel=2e-5, abs=1e-7)
        assert bool(metrics["clusters_begun"]) == bool(oracle.centroids)
        if oracle.centroids:
            np.testing.assert_allclose(learner.centroids, oracle.centroids, rtol=1e-4, atol=1e-5)


def test_clusters_begin_only_when_the_batch_is_unlike_enough() -> None:
    learner = method("cluster-ns", **CLUSTERS | {"start_cosine": -1.0})
    for step in range(3):
        assert "loss_margin" not in learner(tiny.batch(BATCH, seed=step), Solo())[1]
    assert learner.resume_state()["centroids"].numel() == 0


def test_a_centroid_without_points_stays_and_the_others_turn_towards_theirs() -> None:
    centroids = torch.eye(3, dtype=torch.float64)
    points = torch.tensor([[3.0, 1, 0], [2, 0, 1], [0, 5, 1]], dtype=torch.float64)
    found = clusters.moved_centroids(centroids, points, 0.1)
    np.testing.assert_allclose(found, [[1.4, 0.1, 0.1], [0, 1.4, 0.1], [0, 0, 1]], rtol=1e-12)
    assert clusters.second_nearest(points, centroids).argmax(dim=1).tolist() == [1, 2, 2]


def test_the_margin_leaves_alone_what_lies_between_alpha_and_beta() -> None:
    cosines = torch.tensor([[0.9, 0.85, 0.7, 0.2, 0.95]], requires_grad=True)
    shared = torch.tensor([[False, True, True, True, False]])
    loss = clusters.bidirectional_margin_loss(cosines, torch.tensor([0]), shared, alpha=0.1, beta=0.3)
    loss.backward()
    assert loss.item() == pytest.approx((0.05 + 0 + 0.4) / 5)
    assert cosines.grad is not None
    assert cosines.grad.flatten().tolist() == pytest.approx([0.0, 0.2, 0.0, -0.2, 0.0])


def refusal(name: str, batch_size: int, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        TypeAdapter(MethodConfig).validate_python({"name": name, **options}).check(4, batch_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_meant_is_refused() -> None:
    assert "it may be 2 to 64" in refusal("cluster-ns", 64)
    assert "alpha=0.5 is more than train.method.beta=0.3" in refusal("cluster-ns", 256, alpha=0.5)
    assert "at least 2048" in refusal("is-cse", 2048)
    assert "1 to 63" in refusal("is-cse", 64, queue_length=64, neighbours=64)


# RankCSE


@pytest.fixture
def lists() -> tuple[Tensor, Tensor]:
    """Four rankings of seven sentences, and others of the same."""
    return 3 * vectors(4, 7, unit=False), 3 * vectors(4, 7, seed=1, unit=False)


Lists = tuple[Tensor, Tensor]


def test_the_consistency_is_the_jensen_shannon_divergence(lists: Lists) -> None:
    first, second = lists
    found = listwise.ranking_consistency(first, second).item()
    rows = list(zip(first.tolist(), second.tolist(), strict=True))
    assert found == pytest.approx(np.mean([oracles.jensen_shannon(p, q) for p, q in rows]), rel=1e-12)
    peer = jensenshannon(first.softmax(dim=1).numpy(), second.softmax(dim=1).numpy(), axis=1) ** 2
    assert found == pytest.approx(peer.mean(), rel=1e-9)
    assert listwise.ranking_consistency(first, first).item() == pytest.approx(0, abs=1e-15)
    assert listwise.ranking_consistency(second, first).item() == pytest.approx(found, rel=1e-12)


def test_listnet_is_the_cross_entropy_of_the_other_sentences_chances(lists: Lists) -> None:
    itself = [2, 0, 6, 1]
    rows = zip(lists[0].numpy(), lists[1].numpy(), itself, strict=True)
    wanted = [oracles.listnet(np.delete(s, own).tolist(), np.delete(t, own).tolist()) for s, t, own in rows]
    assert listwise.listnet(*lists, torch.tensor(itself)).item() == pytest.approx(np.mean(wanted), rel=1e-12)


def test_listmle_is_the_chance_of_the_teachers_order_and_nothing_else_of_it(lists: Lists) -> None:
    student, teacher = lists
    rows = zip(student.tolist(), teacher.tolist(), strict=True)
    wanted = np.mean([oracles.listmle(given, order) for given, order in rows])
    assert listwise.listmle(student, teacher).item() == pytest.approx(wanted, rel=1e-12)
    assert listwise.listmle(student, 5 * teacher**3).item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("distillation", ["listmle", "listnet"])
@pytest.mark.parametrize("both", [False, True])
def test_rankcse_is_the_weighted_sum_of_its_parts(distillation: str, both: bool, teachers: tuple[str, str]) -> None:
    options = {"teacher": teachers[0], "teacher_weight": 0.3, "consistency_weight": 0.7, "distillation_weight": 0.2,
               "student_temperature": 0.1, "teacher_temperature": 0.2, "distillation": distillation}  # fmt: skip
    learner = method("rankcse", **options, **({"second_teacher": teachers[1]} if both else {}))
    batch = tiny.batch(BATCH, seed=0)
    first, second = two_views(learner, batch, 1)
    taught = np.zeros((BATCH, BATCH))
    for name, weight in zip(teachers, (0.3, 0.7) if both else (1.0, 0.0), strict=True):
        with torch.no_grad():
            teacher = Encoder.load(name, EncoderConfig(name=name, pooling="cls"))
            seen = teacher(batch.input_ids, batch.attention_mask).embedding.double().numpy()
        taught += weight * np.array([[oracles.cosine(u, v) for v in seen] for u in seen])
    forth = np.array([[oracles.cosine(u, v) for v in second] for u in first])
    back = np.array([[oracles.cosine(u, v) for v in first] for u in second])
    taught_parts = []
    for i in range(BATCH):
        if distillation == "listmle":
            taught_parts.append(oracles.listmle((forth[i] / 0.1).tolist(), taught[i].tolist()))
        else:
            given, wanted = np.delete(forth[i], i) / 0.1, np.delete(taught[i], i) / 0.2
            taught_parts.append(oracles.listnet(given.tolist(), wanted.tolist()))
    both_ways = zip((forth / 0.05).tolist(), (back / 0.05).tolist(), strict=True)
    parts = {
        "loss_instance": oracles.info_nce(first, second, range(BATCH), 0.05),
        "loss_consistency": np.mean([oracles.jensen_shannon(there, here) for there, here in both_ways]),
        "loss_distillation": np.mean(taught_parts),
    }
    loss, metrics = learner(batch, Solo())
    wanted = parts["loss_instance"] + 0.7 * parts["loss_consistency"] + 0.2 * parts["loss_distillation"]
    assert loss.item() == pytest.approx(wanted, rel=5e-5)
    assert {name: metrics[name].item() for name in parts} == pytest.approx(parts, rel=2e-4)


def test_teachers_are_no_part_of_what_is_trained_or_saved(teachers: tuple[str, str]) -> None:
    learner = method("rankcse", teacher=teachers[0])
    before = {name: weight.clone() for name, weight in learner.teachers[0].module.state_dict().items()}
    assert not any("teacher" in name for name in learner.state_dict())
    learner.train()
    learner(tiny.batch(BATCH, seed=0), Solo())[0].backward()
    teacher = learner.teachers[0].module
    assert not teacher.training
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())


def test_a_teacher_of_another_vocabulary_or_of_none_is_refused(tmp_path: Path, teachers: tuple[str, str]) -> None:
    words = dict.fromkeys((*tiny.VOCABULARY, "more"))
    other = tiny.save_bert(tmp_path / "other")
    tiny.tokenizer().__class__(vocab={word: at for at, word in enumerate(words)}).save_pretrained(other)

    def refused(teacher: str, max_length: int = 8, **options: Any) -> str:
        settings = TypeAdapter(MethodConfig).validate_python({"name": "rankcse", "teacher": teacher, **options})
        with pytest.raises(InputError) as error:
            settings.check_encoder(EncoderConfig(name=teachers[1], max_length=max_length))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "has another vocabulary (65 tokens)" in refused(other)
    assert refused(str(tmp_path / "nothing")).startswith("train.method.teacher: teacher=")
    assert "the 16 positions" in refused(teachers[0], max_length=20)
    assert "has no layer-attention pooling" in refused(teachers[0], teacher_pooling="layer-attention")


def test_a_teachers_folder_is_read_by_training_and_named_wherever_workers_run(
    tmp_path: Path, teachers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, folder = Path(teachers[0]), tmp_path / "sentences.txt"
    folder.write_text("A few words make a sentence.\n")
    monkeypatch.chdir(teacher.parent)
    config = Config.model_validate({
        "corpus": {"kind": "sentences", "source": {"kind": "text", "path": str(folder)}},
        "encoder": {"name": teachers[1], "max_length": 8},
        "train": {"method": {"name": "rankcse", "teacher": teacher.name}},
    })  # fmt: skip
    train = {stage.name: stage for stage in graph(config)}["train"]
    assert train.config.train.method.teacher == str(teacher)   # type: ignore[attr-defined]
    assert train.reads[str(teacher)] == [str(teacher)]


# All of them


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "angular margin": lambda u, v: functional.angular_margin_info_nce(
        F.normalize(u, dim=-1), F.normalize(v, dim=-1), torch.arange(4), 0.5, 0.2
    ),
    "weighted hard negatives": lambda u, v: functional.hard_negative_info_nce(
        u, v, v.flip(0), torch.arange(4), 0.5, 0.5, 0.3
    ),
    "margin": lambda u, v: clusters.bidirectional_margin_loss(
        u @ v.T, torch.arange(4), ~torch.eye(4, dtype=torch.bool), 0.1, 0.2
    ),
    "consistency": listwise.ranking_consistency,
    "listnet": lambda u, v: listwise.listnet(u, v, torch.tensor([2, 0, 3, 1])),
    "listmle": lambda u, v: listwise.listmle(u, v.detach()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_finite_differences(loss: str) -> None:
    sides = vectors(4, 5, unit=False).requires_grad_(), vectors(4, 5, seed=1, unit=False).requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[loss], sides)


ALL = ["is-cse", "cluster-ns", "rankcse", "arccse"]


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_takes_part_in_the_loss(name: str, names: dict[str, dict[str, Any]]) -> None:
    learner = method(name, "layer-attention", **names[name])
    for step in range(2):
        learner.zero_grad()
        learner(tiny.batch(BATCH, seed=step), Solo())[0].backward()
    assert [name for name, parameter in learner.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", ALL)
def test_equal_sentences_and_equal_views_give_finite_gradients(name: str, names: dict[str, dict[str, Any]]) -> None:
    plain = tiny.batch(1, seed=0)
    same = Batch(plain.input_ids.repeat(BATCH, 1), plain.attention_mask.repeat(BATCH, 1))
    learner = method(name, dropout=0.0, **names[name])
    for _ in range(4):
        loss, metrics = learner(same, Solo())
        learner.zero_grad()
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(value) for value in metrics.values())
        assert all(torch.isfinite(parameter.grad).all() for parameter in learner.parameters())


@pytest.mark.parametrize("name", ["rankcse", "arccse", "is-cse"])
def test_a_batch_of_one_sentence_has_a_finite_loss(name: str, names: dict[str, dict[str, Any]]) -> None:
    for options in ({"distillation": "listnet"}, {"distillation": "listmle"}) if name == "rankcse" else ({},):
        loss, _ = method(name, **names[name] | options)(tiny.batch(1, seed=0), Solo())
        loss.backward()
        assert torch.isfinite(loss)


@pytest.mark.parametrize("name", ["is-cse", "cluster-ns"])
def test_what_is_resumed_goes_on_as_if_never_stopped(name: str, names: dict[str, dict[str, Any]]) -> None:
    one, other = (method(name, dropout=0.0, **names[name]) for _ in range(2))
    other.load_resume_state(one.resume_state())                # of a run that has only begun
    for step in range(3):
        one(tiny.batch(BATCH, seed=step), Solo())
    other.load_resume_state(one.resume_state())
    assert not any("queue" in weight or "centroid" in weight for weight in one.state_dict())
    losses = [learner(tiny.batch(BATCH, seed=3), Solo())[0].item() for learner in (one, other)]
    assert losses[0] == losses[1]
    for kept, again in zip(one.resume_state().values(), other.resume_state().values(), strict=True):
        assert torch.equal(kept, again)


Trained = tuple[float, list[np.ndarray], list[np.ndarray]]


def trained(world: World, name: str, options: dict[str, Any]) -> Trained:
    """Loss, mean gradients and state after some steps of the global batch, weights unchanged."""
    learner = method(name, dropout=0.0, **options)
    for step in range(3):
        batch = tiny.batch(BATCH, seed=step)
        ids, mask = (rows.reshape(world.size, -1, rows.shape[1])[world.rank] for rows in
                     (batch.input_ids, batch.attention_mask))  # fmt: skip
        learner.zero_grad()
        loss, _ = learner(Batch(ids, mask), world)
        loss.backward()
    found = [world.mean(parameter.grad).numpy() for parameter in learner.parameters() if parameter.grad is not None]
    return world.mean(loss.detach()).item(), found, [value.numpy() for value in learner.resume_state().values()]


def all_trained(world: World, names: dict[str, dict[str, Any]]) -> list[Trained]:
    listnet = names["rankcse"] | {"distillation": "listnet"}
    return [trained(world, name, options) for name, options in [*names.items(), ("rankcse", listnet)]]


@pytest.mark.cluster
def test_two_workers_have_the_loss_gradients_and_state_of_one(names: dict[str, dict[str, Any]]) -> None:
    (alone,), (together, other) = in_processes(1, all_trained, names), in_processes(2, all_trained, names)
    for name, wanted, found, others in zip([*names, "listnet"], alone, together, other, strict=True):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5), name
        assert found[0] == others[0]
        for one, two in zip(wanted[1], found[1], strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(one).max()), err_msg=name)
        for one, two, three in zip(wanted[2], found[2], others[2], strict=True):
            np.testing.assert_array_equal(two, three)
            np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)
