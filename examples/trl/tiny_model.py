"""A policy to try the example without a GPU: python -m examples.trl.tiny_model FOLDER.

A random Qwen3 of 2 layers whose words are the numbers from 0 to 509, each about as likely as any
other. With ``--learning-rate 1e-2`` it learns the example's reward in a few steps.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 512
PAD, END = VOCAB - 2, VOCAB - 1


def tokenizer() -> PreTrainedTokenizerFast:
    """Numbers between spaces; any other word is the padding token."""
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token=str(PAD)))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=str(END), pad_token=str(PAD), unk_token=str(PAD)
    )


def save(path: Path, seed: int = 0, **more: int) -> Path:
    """Write a BF16 checkpoint with its tokenizer. Sides of all FP8 matrices are whole blocks.

    Args:
        more: what of ``Qwen3Config`` is to be another.
    """
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }
    config = Qwen3Config(
        **shape | more,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


if __name__ == "__main__":
    save(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
