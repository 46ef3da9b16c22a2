"""A tiny Llama in a folder, whose tokenizer knows the words w0 to w255; w1 ends an answer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_WORDS = 256


def make(path: Path) -> Path:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(NUM_WORDS)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(path)
    config = LlamaConfig(
        vocab_size=NUM_WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path
