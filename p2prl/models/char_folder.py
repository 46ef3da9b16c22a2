"""The character tokenizer as files that transformers reads, for exports of the built-in policy.

In: a folder. Out: tokenizer.json and its configuration in it; `AutoTokenizer` then gives `CharTokenizer`'s ids, and
refuses what that refuses.
"""

from pathlib import Path

from p2prl.models.char_tokenizer import ALPHABET, END_ID, PAD_ID

PAD, END = "<pad>", "<end>"


def write_char_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {PAD: PAD_ID, END: END_ID} | {character: 2 + place for place, character in enumerate(ALPHABET)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<none>"))  # which is no token: unknown text is an error
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
