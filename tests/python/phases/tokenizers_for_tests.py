"""Small tokenizers, trained on a family's own text so that markers merge with their neighbours."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level_tokenizer(text: str, control: list[str], tags: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with added tokens."""
    tokenizer = Tokenizer(models.BPE())
    # Pieces across spaces and punctuation, as no real tokenizer makes them: the hardest case.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*text.splitlines(keepends=True), text], trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in control])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in tags])
    return tokenizer
