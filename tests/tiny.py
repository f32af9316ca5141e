"""Encoders, batches, corpora and scored pairs so small that everything runs in a blink."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizer

from stages.artifacts import Corpus
from stages.encoder import Encoder, EncoderConfig, LayerAttentionConfig, Pooling
from stages.methods.base import Batch

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"word{at}" for at in range(59)]
VOCABULARY = SPECIAL + WORDS


def bert_config(depth: int = 4, dropout: float = 0.1) -> BertConfig:
    """Hidden states of 32 numbers; weights wide enough that sentences differ."""
    return BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=depth,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        initializer_range=0.2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def encoder(
    pooling: Pooling = "layer-attention",
    dropout: float = 0.1,
    layer_attention: LayerAttentionConfig | None = None,
    seed: int = 0,
) -> Encoder:
    """A random BERT of 4 layers under a pooling, in training mode."""
    torch.manual_seed(seed)
    backbone = BertModel(bert_config(dropout=dropout), add_pooling_layer=False)
    layer_attention = layer_attention or LayerAttentionConfig(init="random")
    return Encoder(backbone, EncoderConfig(pooling=pooling, layer_attention=layer_attention)).train()


def save_bert(folder: Path, depth: int = 4) -> str:
    """The same BERT with a word-a-token tokenizer, as a folder that Encoder.load takes."""
    torch.manual_seed(0)
    BertModel(bert_config(depth)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def save_masked_lm(folder: Path) -> str:
    """The same BERT with its masked-LM head, as raw encoders come."""
    torch.manual_seed(0)
    BertForMaskedLM(bert_config()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def tokenizer() -> BertTokenizer:
    """A word a token."""
    return BertTokenizer(vocab={word: at for at, word in enumerate(VOCABULARY)})


def token_lists(count: int, seed: int) -> list[list[int]]:
    """Sentences of 1 to 10 words between [CLS] and [SEP]."""
    random = np.random.default_rng(seed)
    return [
        [2, *random.integers(len(SPECIAL), len(VOCABULARY), size=random.integers(1, 11)).tolist(), 3]
        for _ in range(count)
    ]


def batch(count: int, seed: int) -> Batch:
    """So many sentences, padded."""
    rows = [torch.tensor(tokens) for tokens in token_lists(count, seed)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(ids, (ids != 0).long())


def corpus(folder: Path, count: int, seed: int = 0) -> Corpus:
    """A prepared corpus in two parts."""
    folder.mkdir(parents=True)
    sentences = token_lists(count, seed)
    half = count // 2
    for number, part in enumerate((sentences[:half], sentences[half:])):
        column = pa.array(part, pa.list_(pa.int32()))
        pq.write_table(pa.table({"input_ids": column}), folder / f"part-{number:05}.parquet")
    return Corpus(folder, count)


def scored_pairs(file: Path, count: int = 24, seed: int = 7) -> str:
    """A jsonl of sentence pairs whose score is their number of common words."""
    random = np.random.default_rng(seed)
    with file.open("w") as lines:
        for at in range(count):
            first = random.choice(WORDS, size=6, replace=False).tolist()
            second = first[: at % 6] + random.choice(WORDS, size=1 + at % 4).tolist()
            row = {"sentence1": " ".join(first), "sentence2": " ".join(second), "score": at % 6}
            lines.write(json.dumps(row) + "\n")
    return str(file)
