"""The built-in policy: a Llama small enough for a swarm on two cores, with weights in the package.

In: nothing. Out: its architecture, a module with fresh weights, the path of the warm-started weights.

torch and transformers are imported only when a module is asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from p2prl.models.char_tokenizer import END_ID, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Two layers rather than four: on a small model a token's cost is calls, not arithmetic.
HIDDEN_SIZE = 128
NUM_LAYERS = 2
NUM_HEADS = 4
INTERMEDIATE_SIZE = 384
MAX_POSITIONS = 64

WEIGHTS = Path(__file__).parent / "builtin_weights" / "addition.safetensors"


def make_builtin() -> "LlamaForCausalLM":
    """The architecture with fresh weights drawn from torch's global generator, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    return LlamaForCausalLM(config)
