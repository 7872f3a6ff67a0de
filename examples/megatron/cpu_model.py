"""Models of megatron-core on CPUs, which mbridge loads from a checkpoint and exports.

mbridge knows the modules of TransformerEngine, which needs a GPU. Here megatron-core's own modules
hold the parameters, shown to mbridge under the names of TransformerEngine's. On GPUs,
``bridge.get_model`` makes the model instead.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mbridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn
from transformers import AutoConfig


class Layout(NamedTuple):
    """How many ranks share each kind of work."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


def load(checkpoint: Path, layout: Layout) -> tuple[Any, nn.Module]:
    """This rank's part of a Qwen3 or Qwen3-MoE checkpoint; all ranks of the job call it.

    Returns:
        the bridge, and the model for ``bridge.export_weights``.
    """
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # mbridge allocates there
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        # experts are either cut, as other layers are, or whole on some ranks
        expert_tensor_parallel_size=1 if layout.expert > 1 else layout.tensor,
    )
    config = AutoConfig.from_pretrained(checkpoint)
    config.rope_theta = config.rope_parameters["rope_theta"]  # where mbridge 0.15 looks for it
    bridge = AutoBridge.from_config(config)
    experts = getattr(config, "num_experts", None)
    bridge.set_extra_args(
        use_cpu_initialization=True,
        sequence_parallel=False,
        variable_seq_lengths=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **(
            {"moe_grouped_gemm": False, "moe_token_dispatcher_type": "allgather"} if experts else {}
        ),
    )
    model = GPTModel(
        config=bridge.config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    view = _View(model, is_dense=experts is None)
    with torch.no_grad():
        bridge.load_weights([view], str(checkpoint))
    return bridge, view


class _View(nn.Module):
    """A model's parameters under the names of TransformerEngine's modules."""

    def __init__(self, model: Any, is_dense: bool) -> None:
        super().__init__()
        self.config = model.config
        layers: Any = nn.ModuleList(nn.Module() for _ in model.decoder.layers)
        self.decoder = nn.Module()
        self.decoder.layers = layers
        for mine, theirs in zip(layers, model.decoder.layers, strict=True):
            mine.layer_number = theirs.layer_number  # of the whole model
        for name, parameter in model.named_parameters():
            *path, last = _renamed(name, is_dense).split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, parameter)


def _renamed(name: str, is_dense: bool) -> str:
    name = re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight", r"experts.\2.weight\1", name
    )
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if is_dense:  # before experts it is a module of its own
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    return name
