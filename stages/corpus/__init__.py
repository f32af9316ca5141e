"""From text files to tokenised, distinct sentences."""
