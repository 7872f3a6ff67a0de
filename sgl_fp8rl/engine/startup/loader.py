"""Loading for ``--quantization fp8rl``: the first set of weights is written as an update is.

Routes are recorded from the checkpoint's headers; then each tensor is read, quantized and written
through them. The BF16 model is never whole in engine memory.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import attach
from sgl_fp8rl.engine.startup.kv_setup import attach_kv_scales, load_kv_scales
from sgl_fp8rl.options import current_options
from sgl_fp8rl.protocol.checkpoint_headers import read_headers
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.receiver.checkpoint_files import read_tensors
from sgl_fp8rl.receiver.checkpoint_source import write_all
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.host import gather
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.routes.routes import shapes_of
from sgl_fp8rl.receiver.update_steps import skipped_by_all

logger = logging.getLogger(__name__)

MLA_MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Models whose attention is MLA and that are served, Kimi K2 among them; others derive tensors from
weights in ways of their own."""


class FP8RLModelLoader(compat.DefaultModelLoader):  # type: ignore[misc]
    """Reads a BF16 or block-FP8 safetensors checkpoint into FP8 storage."""

    def __init__(self, load_config: Any, options: Fp8RLServerArgs) -> None:
        super().__init__(load_config)
        self._options = options

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        self._model_config = model_config
        return super().load_model(  # type: ignore[no-any-return]
            model_config=model_config, device_config=device_config
        )

    def load_weights_and_postprocess(self, model: nn.Module, _: Any, target_device: Any) -> None:
        """Replaces the base's static method, and its reader, which holds whole shards in memory."""
        options = self._options
        kv = attach_kv_scales(model, self._model_config, options)
        engine_weights = EngineWeights(model, self._model_config.dtype, kv, options)
        attach(model, engine_weights)
        source = self.Source.init_new(self._model_config, model)
        _, files, _ = self._prepare_weights(source.model_or_path, source.revision, False)
        manifest = Manifest(read_headers(files), options.bucket_bytes // 2)
        self._load(engine_weights, manifest, read_tensors(files))
        load_kv_scales(kv, options.kv_scales)
        postprocess(model)
        engine_weights.check_addresses()

    def _load(
        self,
        engine_weights: EngineWeights,
        manifest: Manifest,
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        kv_scales = engine_weights.kv_scales_in(manifest)
        engine_weights.table = record_routes(engine_weights.model, shapes_of(manifest, kv_scales))
        skipped = skipped_by_all(
            engine_weights, partial(gather, group=compat.get_tp_group().cpu_group)
        )
        engine_weights.table.skipped = frozenset(skipped)
        if skipped:
            # DeepSeek-V3's layer for drafts alone has 800
            some = ", ".join(sorted(skipped)[:3])
            logger.info("SGLang's loader does not keep %d tensors, such as %s", len(skipped), some)
        engine_weights.accept(manifest)
        write_all(engine_weights, manifest, tensors)
        # its tables lie in memory that the memory saver may take away, and are not needed again
        engine_weights.forget(manifest.fingerprint)


class FP8RLDummyLoader(compat.DummyModelLoader):  # type: ignore[misc]
    """``--load-format dummy``: random weights, quarantined; the first update records the routes."""

    def __init__(self, load_config: Any, options: Fp8RLServerArgs) -> None:
        super().__init__(load_config)
        self._options = options

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        model = super().load_model(model_config=model_config, device_config=device_config)
        kv = attach_kv_scales(model, model_config, self._options)
        load_kv_scales(kv, self._options.kv_scales)
        weights = EngineWeights(model, model_config.dtype, kv, self._options)
        weights.quarantine("the engine was started with dummy weights; send a complete update")
        attach(model, weights)
        return model  # type: ignore[no-any-return]


def choose_loader(original: Any, load_config: Any, model_config: Any = None) -> Any:
    """AROUND ``get_model_loader``: the quantization implies the loader.

    Raises:
        ValueError: a load format that cannot quantize on the way in.
    """
    if model_config is None or model_config.quantization != NAME:
        return original(load_config, model_config)
    formats = compat.LoadFormat
    if load_config.load_format == formats.DUMMY:
        return FP8RLDummyLoader(load_config, current_options())
    if load_config.load_format not in (formats.AUTO, formats.SAFETENSORS):
        raise ValueError(
            f"quantization fp8rl loads safetensors checkpoints, not load format "
            f"{load_config.load_format}; use --load-format auto or dummy"
        )
    load_config.load_format = formats.SAFETENSORS
    return FP8RLModelLoader(load_config, current_options())


def keep_mixtral(original: Any, model_config: Any) -> Any:
    """AROUND ``get_model_architecture``: SGLang gives Mixtral another class, without fused experts,
    under a quantization name that it does not know."""
    if model_config.quantization != NAME:
        return original(model_config)
    model_config.quantization = "fp8"
    try:
        return original(model_config)
    finally:
        model_config.quantization = NAME


def without_padding(original: Any, model_config: Any, *args: Any) -> Any:
    """AROUND ``adjust_config_with_unaligned_cpu_tp``: on a CPU SGLang pads sizes that are not
    whole blocks, for AMX kernels that we do not use."""
    if model_config.quantization == NAME:
        return model_config
    return original(model_config, *args)


def verify_model(original: Any, model_config: Any) -> None:
    """AROUND ``ModelConfig._verify_quantization``: refuse at start what cannot be served right."""
    original(model_config)
    mla = compat.AttentionArch.MLA
    if model_config.quantization != NAME or model_config.attention_arch != mla:
        return
    architecture = (model_config.hf_config.architectures or ["this model"])[0]
    if compat.is_deepseek_dsa(model_config.hf_config):
        raise ValueError(
            f"quantization fp8rl cannot serve {architecture} yet: updates do not know the indexer "
            f"of its sparse attention (DSA); start it without fp8rl"
        )
    if architecture not in MLA_MODELS:
        raise ValueError(
            f"quantization fp8rl cannot serve {architecture} yet: its MLA attention may keep "
            f"tensors that an update would leave stale; start it without fp8rl"
        )


def postprocess(model: nn.Module) -> None:
    """Run each quant method's post-processing, as SGLang's own loader does."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
