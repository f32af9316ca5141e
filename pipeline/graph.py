"""Which stages an experiment has, and what each needs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.errors import InputError
from pipeline.config import Config
from pipeline.dag import Stage
from stages.corpus.config import CorpusConfig
from stages.corpus.prepare import CorpusJob, check_source, prepare_corpus
from stages.corpus.prose import versions_digest
from stages.encoder import check_encoder, check_poolings, resolve
from stages.evaluate.config import GRADED_SAMPLE, EvaluateConfig, SimilaritySet
from stages.evaluate.data import check_evaluation
from stages.evaluate.evaluate import EvaluateJob, evaluate
from stages.evaluate.sts import SAMPLE_FILE
from stages.evaluate.validation import validation_files
from stages.labelled.config import LabelledConfig
from stages.labelled.prepare import LabelledJob, check_labelled, prepare_labelled
from stages.methods.registry import check_kind
from stages.train import TrainConfig, TrainJob, check_train, train

NOT_DECISIVE = (
    "evaluate.baseline_poolings",                              # an EvaluateJob names the poolings to score itself
    "evaluate.keep_embeddings",
)
DATA_OF_EVALUATION = {"data", "sts", "similarity", "transfer", "protocol", "allow_partial"}  # which pairs are scored
BOOKKEEPING = (                                                # change no weight
    "train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "train.max_nonfinite",
)  # fmt: skip


def graph(config: Config) -> tuple[Stage, ...]:
    """The stages of one experiment, every input checked before anything runs.

    ``corpus`` -> ``train`` -> ``after``, and ``before`` beside them; ``after`` alone where ``train`` is null.

    Raises:
        InputError: a file, an encoder or a combination of settings that cannot work.
    """
    config = with_absolute_paths(config)
    name, pooling = config.encoder.name, config.encoder.pooling
    check_encoder(name)
    check_poolings(name, (pooling, *(config.evaluate.baseline_poolings if config.train else ())))
    whitening = config.evaluate.whitening
    hidden = int(check_encoder(name).hidden_size)
    if whitening is not None and (whitening.dimensions or 0) > hidden:
        raise InputError(
            f"evaluate.whitening.dimensions={whitening.dimensions} is more than the {hidden} numbers of {name}'s "
            f"embeddings; it may be 1 to {hidden}"
        )
    fitted_on = ("corpus",) if whitening is not None and whitening.fit == "corpus" else ()
    scored = check_evaluation(config.evaluate)
    if config.train is None:
        corpus = (_corpus(config, scored),) if fitted_on else ()
        return (*corpus, _evaluate("after", config, scored, name, (pooling,), fitted_on))
    return (
        _corpus(config, scored),
        _train(config, config.train, config.cluster),
        _evaluate("before", config, scored, name, config.evaluate.baseline_poolings, fitted_on),
        _evaluate("after", config, scored, None, (pooling,), ("train", "corpus")),
    )


def _evaluate(
    stage: str,
    config: Config,
    scored: Mapping[str, Sequence[str]],
    encoder: str | None,
    poolings: tuple[str, ...],
    needs: tuple[str, ...],
) -> Stage:
    """Score an encoder of the config, or, if None, the one of the train stage among ``needs``."""
    reads = {**scored, **(_encoder_files(encoder) if encoder else {})}
    job = EvaluateJob(evaluate=config.evaluate, encoder=encoder, poolings=poolings)
    return Stage(stage, evaluate, job, needs, reads, indifferent=NOT_DECISIVE, version=2)


def _corpus(config: Config, scored: Mapping[str, Sequence[str]]) -> Stage:
    if not isinstance(config.corpus, CorpusConfig):
        return _labelled(config, config.corpus, scored)
    job = CorpusJob(
        corpus=config.corpus,
        tokenizer=config.encoder.name,
        max_length=config.encoder.max_length,
        seed=config.seed,
        exclude=config.evaluate.data,
    )
    source = config.corpus.source
    reads = {getattr(source, "path", source.kind): check_source(config.corpus), **_encoder_files(config.encoder.name)}
    reads[config.evaluate.data or GRADED_SAMPLE] = [config.evaluate.data or str(SAMPLE_FILE)]
    installed = versions_digest() if source.kind == "python-docs" else ""
    return Stage("corpus", prepare_corpus, job, reads=reads, also=installed, version=2)


def _labelled(config: Config, corpus: LabelledConfig, scored: Mapping[str, Sequence[str]]) -> Stage:
    """The corpus stage where the corpus is labelled rows; the data that scores and validates is held against them."""
    evaluate, validation = config.evaluate, config.train.validation if config.train else None
    job = LabelledJob(
        corpus=corpus,
        tokenizer=config.encoder.name,
        max_length=config.encoder.max_length,
        seed=config.seed,
        evaluate=EvaluateConfig.model_validate(evaluate.model_dump(include=DATA_OF_EVALUATION)),
        validation=validation,
    )
    held = {named: list(files) for named, files in scored.items()}
    validated_on = validation.path if validation else evaluate.data or GRADED_SAMPLE
    _add(held, validated_on, validation_files(validation, evaluate.data))
    _add(held, corpus.source.path, check_labelled(corpus))
    reads = {**held, **_encoder_files(config.encoder.name)}
    return Stage("corpus", prepare_labelled, job, reads=reads)


def _train(config: Config, settings: TrainConfig, cluster: ClusterConfig) -> Stage:
    data = None if settings.validation and not settings.transfer_tasks else config.evaluate.data
    job = TrainJob(train=settings, encoder=config.encoder, evaluation_data=data, seed=config.seed)
    check_kind(settings.method.name, config.corpus.kind)
    reads = {**check_train(job, cluster), **_encoder_files(config.encoder.name)}
    for name in settings.method.reads_encoders:
        reads |= _encoder_files(name)
    precision = "" if cluster.precision == "auto" else cluster.precision
    version = settings.method.version
    return Stage(
        "train", train, job, ("corpus",), reads, also=precision, indifferent=BOOKKEEPING, stoppable=True,
        version=version,
    )  # fmt: skip


def _add(reads: dict[str, list[str]], named: str, files: Sequence[str]) -> None:
    """More files behind a name that the config may use for others already."""
    reads[named] = [*reads.get(named, []), *(file for file in files if file not in reads.get(named, []))]


def _encoder_files(name: str) -> dict[str, list[str]]:
    """The encoder's folder, if it lies on this machine."""
    source = resolve(name)
    return {name: [source]} if Path(source).is_dir() else {}


def with_absolute_paths(config: Config) -> Config:
    """Make what exists on this machine absolute, for workers run in folders of their own."""
    changes: dict[str, object] = {
        "encoder": config.encoder.model_copy(update={"name": _real(config.encoder.name)}),
    }
    data = None if config.evaluate.data is None else _absolute(config.evaluate.data)
    similarity = tuple(_with_absolute_files(each) for each in config.evaluate.similarity)
    changes["evaluate"] = config.evaluate.model_copy(update={"data": data, "similarity": similarity})
    source = config.corpus.source
    if source.kind not in ("hub", "python-docs"):
        path = _absolute(source.path)                          # type: ignore[union-attr]
        changes["corpus"] = config.corpus.model_copy(update={"source": source.model_copy(update={"path": path})})
    if config.train is not None:
        train, validation = config.train, config.train.validation
        if validation is not None:
            validation = validation.model_copy(update={"path": _absolute(validation.path)})
        located = {"validation": validation, "method": train.method.located(_real)}
        changes["train"] = train.model_copy(update=located)
    return config.model_copy(update=changes)


def _with_absolute_files(chosen: SimilaritySet) -> SimilaritySet:
    files = {"path": _absolute(chosen.path)}
    if chosen.kind == "file" and chosen.validation is not None:
        files["validation"] = _absolute(chosen.validation)
    return chosen.model_copy(update=files)


def _real(name: str) -> str:
    """As :func:`_absolute`, and behind links: that to a run's encoder points elsewhere once the run is repeated."""
    path = _absolute(name)
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _absolute(path: str) -> str:
    """Absolute if something lies there or a glob may find something there; names of the hub and URLs stay."""
    expanded = Path(path).expanduser()
    if "://" in path or not (expanded.exists() or any(sign in path for sign in "*?[")):
        return path
    return str(expanded.absolute())
