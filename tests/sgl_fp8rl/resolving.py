"""SGLang's arguments as SGLang itself resolves them, on a GPU that this machine need not have.

Its code asks torch what GPU there is, and keeps the answers. Here torch names one of a compute
capability, SGLang forgets what it was told before, and its platform is that of CUDA. All else is
SGLang's: the parser, the resolution, the way to a child process, and what that publishes.
"""

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import QUANTIZATION_CHOICES, prepare_server_args
from sglang.srt.utils import common

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat, plugin
from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.engine.layers.quant_config import FP8RLConfig

Capability = tuple[int, int]
HOPPER, ADA, BLACKWELL = (9, 0), (8, 9), (10, 0)
MEMORY_MIB = 143771
"""Of an H200."""
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
QUANTIZED = DENSE | {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}


class Start:
    """The start of engines with SGLang, as far as no model is loaded."""

    def __init__(self, patch: pytest.MonkeyPatch, stack: ExitStack, folder: Path) -> None:
        self._patch, self._stack, self._folder = patch, stack, folder
        self.model = self.checkpoint(DENSE)

    def checkpoint(self, config: dict[str, Any]) -> str:
        """A folder with a model's configuration."""
        path = self._folder / config["architectures"][0] / str(len(config))
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    def on(self, capability: Capability | None) -> None:
        """Take place on GPUs of this compute capability; None: on the CPU, as without a call."""
        if capability is None:
            return
        properties = SimpleNamespace(
            name="NVIDIA H200",
            multi_processor_count=132,
            major=capability[0],
            minor=capability[1],
            total_memory=MEMORY_MIB << 20,
        )
        for name, value in {
            "is_available": True,
            "device_count": 8,
            "current_device": 0,
            "get_device_capability": capability,
            "get_device_name": properties.name,
            "get_device_properties": properties,
        }.items():
            self._patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        self._patch.setattr(common, "get_nvgpu_memory_capacity", lambda: MEMORY_MIB)
        self._patch.setattr(compat.current_platform, "__class__", CudaSRTPlatform)
        forget_answers()

    def made(self, **fields: Any) -> Any:
        """Arguments that a framework made without our parsers."""
        return compat.ServerArgs(**{"model_path": self.model, "quantization": NAME, **fields})

    def flags(self, *argv: str) -> Any:
        """Arguments of a command line that goes through our hooks."""
        return prepare_server_args(["--model-path", self.model, "--quantization", NAME, *argv])

    def published(self, server_args: Any) -> Any:
        """The same in a scheduler: resolved by its parent, pickled, and published there."""
        resolved(server_args)
        arrived = pickle.loads(pickle.dumps(server_args))
        self._stack.enter_context(get_context().override_server_args())  # put back at the end
        get_context().set_server_args(arrived)
        return arrived


def forget_answers() -> None:
    """Have SGLang ask torch again what GPU there is."""
    for value in vars(common).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@contextmanager
def start(folder: Path) -> Iterator[Start]:
    """SGLang as it starts engines of ours; all is put back at the end."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for methods in (compat.QUANTIZATION_METHODS, compat.BASE_QUANTIZATION_METHODS):
            patch.setitem(methods, NAME, FP8RLConfig)
        if NAME not in QUANTIZATION_CHOICES:
            QUANTIZATION_CHOICES.append(NAME)
            stack.callback(QUANTIZATION_CHOICES.remove, NAME)
        for name, hook in (
            ("add_cli_args", plugin.add_flags),
            ("from_cli_args", plugin.from_flags),
        ):
            patch.setattr(compat.ServerArgs, name, vars(compat.ServerArgs)[name])
            around = [(HookType.AROUND, hook, None)]
            HookRegistry._apply_target(compat.HOOK_TARGETS[f"ServerArgs.{name}"], around)
        stack.enter_context(mock.patch.dict(os.environ))
        made = Start(patch, stack, folder)
        # what they import would look for a GPU's libraries
        resolved(made.made())
        assert compat.FusedMoE
        yield made
    forget_answers()
