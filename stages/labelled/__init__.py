"""From files of pairs, triplets or inferences to tokenised rows of two or three sentences."""
