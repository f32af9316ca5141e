"""The trained encoder as MLflow serves it: sentences in, embeddings out.

MLflow loads this module (``_load_pyfunc``) from the code logged beside the weights, in a process that has
nothing else of this project; whatever is imported here travels with the model, so import little.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from stages.encoder import Encoder, load_tokenizer, max_positions

BATCH = 64                                                     # sentences encoded at once


class SentenceEncoder:
    """An encoder, its pooling and its tokenizer."""

    def __init__(self, folder: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.encoder = Encoder.load(folder).to(self.device)
        self.tokenizer = load_tokenizer(folder)
        self.max_length = max_positions(folder)

    @torch.inference_mode()
    def predict(self, sentences: ArrayLike) -> NDArray[np.float32]:
        """Encode n sentences.

        Args:
            sentences: a list or an array of n str, or a data frame whose first column holds them.

        Returns:
            (n, D) float32, not normalised; what lies beyond the encoder's last position is cut off.

        Raises:
            ValueError: a sentence is no str; its row is named.
        """
        table = np.asarray(sentences, dtype=object)
        texts = (table[:, 0] if table.ndim == 2 else table.reshape(-1)).tolist()
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise ValueError(f"sentence {row} is {text!r}, not a str; drop or fill missing values first")
        embeddings = np.empty((len(texts), int(self.encoder.backbone.config.hidden_size)), np.float32)  # type: ignore[union-attr, arg-type]
        longest_first = sorted(range(len(texts)), key=lambda row: -len(texts[row]))   # little padding a batch
        for start in range(0, len(texts), BATCH):
            rows = longest_first[start : start + BATCH]
            batch = self.tokenizer(
                [texts[row] for row in rows],
                padding=True, truncation=True, max_length=self.max_length, return_tensors="pt",
            ).to(self.device)  # fmt: skip
            layers = self.encoder.layers(batch["input_ids"], batch["attention_mask"])
            embeddings[rows] = self.encoder.pool(layers).cpu().numpy()
        return embeddings


def _load_pyfunc(data_path: str) -> SentenceEncoder:
    """What MLflow calls, with the folder of the encoder's files."""
    return SentenceEncoder(data_path)
