"""A whole model folder as whoever serves it needs it: weights that are accounted for, and the tokenizer that goes with them."""

from pathlib import Path

from edge_runtime.errors import CheckpointError, cut
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer


def open_whole(folder: str | Path) -> tuple[Checkpoint, Tokenizer]:
    """Both, or the error that a node would end with; no weight is read yet."""
    checkpoint = Checkpoint.open(folder)
    return checkpoint, tokenizer_of(checkpoint)


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model, whose ends of answers are tokens that the model has.

    It may know more tokens than that, as those of models do that read text and more.
    """
    tokenizer, vocab_size = Tokenizer.open(checkpoint.folder), checkpoint.spec.vocab_size
    if beyond := sorted(each for each in tokenizer.eos_token_ids if each >= vocab_size):
        raise CheckpointError(
            f"{tokenizer.eos_source}: eos_token_id names {cut(', '.join(map(str, beyond)))}, expected ids below the model's "
            f"vocab_size {vocab_size}; take this file and config.json from the same model"
        )
    return tokenizer
