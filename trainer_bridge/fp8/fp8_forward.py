"""``fp8_forward``: a trainer computes its forward with the codes that its engines serve."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sgl_fp8rl.formats import FORMATS, QUANTIZED, split_name
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.code_sums import Sums, code_sum, scale_sum, total
from sgl_fp8rl.protocol.kv_schema import INT8
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.engines.engine_client import EngineError, check_fields
from trainer_bridge.fp8.engine_norms import convert_norms
from trainer_bridge.fp8.fp8_weights import moves_codes
from trainer_bridge.kv import attention_hooks
from trainer_bridge.kv.fp8_attention import fake_quantize_kv, scales_in
from trainer_bridge.ranks.collective import Leader, ranks_of
from trainer_bridge.ranks.group import group_of
from trainer_bridge.session.participant import Participant, participants_of
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.adapters import has_adapters
from trainer_bridge.sources.hf_names import named_modules
from trainer_bridge.sources.parameters import Named, Source, named_tensors, sources
from trainer_bridge.transfer.layout import format_of_codes

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class FP8Forward:
    """What ``fp8_forward`` made of a model."""

    model: nn.Module
    """The model itself."""
    dtype: torch.dtype
    """The engine's, to which weights are rounded before they are quantized."""
    names: tuple[str, ...]
    """HF tensors whose codes the forward computes with, sorted."""
    ranks: tuple[int, ...] = ()
    """Global ranks that called ``fp8_forward`` together; empty of one that is alone."""
    format: WeightFormat = QUANTIZED
    """The engine's."""

    @property
    def gathered_whole(self) -> list[str]:
        """Parameters that FSDP2 gathers as they are and each rank quantizes at each all-gather: its
        ranks' rows are not whole blocks. All others are gathered as codes."""
        return [
            f"{prefix}.{attribute}"
            for prefix, module in named_modules(self.model)
            for attribute in vars(module).get("fp8_parameters", ())
            for parameter in (getattr(module, attribute),)
            if isinstance(parameter, DTensor) and not moves_codes(parameter)
        ]

    def check(self, engine: Any) -> None:
        """Check that an engine serves the very codes that the forward computes with now.

        It compares sums over the bits of each tensor's codes and scales. All ranks call that called
        ``fp8_forward``, and with FSDP2 gather each tensor once.

        Args:
            engine: as for ``update``, all of a list; that of the first rank is asked.

        Raises:
            EngineError: a tensor or the format differs, on every rank; or the engine cannot be
                reached.
        """
        leader = Leader(self.ranks)
        try:
            found, fault = attempt(_computed_with, self.model)  # quantizes, on each rank
            leader.attempt(_raise_first, leader.collect(fault))
            leader.share(None)
            assert found is not None
            named = found
            theirs = leader.attempt(_sums_of, engine, self.format)
            ours: dict[tuple[str, str], torch.Tensor] = {}
            family = hf_names.model_type(self.model)
            of_forward = {n + suffix for n in self.names for suffix in ("", *QUANTIZED.suffixes)}
            planned = sources(named, family, self.dtype)
            for (_, tensor), source in zip(named, planned, strict=True):
                if any(name in of_forward for name, _ in source.cuts):
                    whole = source.read(tensor)
                    leader.attempt(_add_sums, ours, source, whole, self)
            leader.attempt(_compare, ours, theirs)
            leader.share(None)
        except BaseException as error:
            leader.tell(error)
            raise

    def sync_kv_scales(self, engine: Any) -> None:
        """Fake-quantize K and V in attention as an engine's KV cache does, in E4M3 under the scales
        that it has now; with a BF16 cache, leave them as they are. Call it on all ranks: once where
        the cache is INT8, whose scales are of tokens. In E4M3 ``response_logprobs`` of a rollout
        does it, under the scales that this carries; call it before other forward passes.

        Args:
            engine: as for ``check``. Of several in E4M3, all have the scales that an update brought
                (``kv_scales=``); without them each one measures its own.

        Raises:
            EngineError: an engine cannot be reached, has not measured its scales yet, or has other
                ones than the first, or another KV cache.
            ValueError: it has other layers than the model.
        """
        leader = Leader(self.ranks)
        remedy = "start all with the same KV cache, and in E4M3 give kv_scales to update"
        scales = leader.share(leader.attempt(_of_all, engine, _kv_scales_of, remedy))
        fake_quantize_kv(self.model, scales, self.dtype)


def fp8_forward(
    model: nn.Module, like: Any, *, group: dist.ProcessGroup | None = None
) -> FP8Forward:
    """Compute the forward of the layers that an engine keeps in FP8 as it does.

    Weights are rounded to the engine's dtype and quantized once a step, activations in each
    forward; RMS norms round as the engine's do. Weight gradients are those of BF16 layers; input
    gradients are computed with the weights that the codes stand for. ``update`` then sends the
    codes. Parameters, their names and the optimizer stay; call it before ``fully_shard`` and before
    a wrapper of the layers.

    Args:
        model: a causal language model of transformers; its linears are ``nn.Linear``, and experts
            3-D parameters with [gate; up] rows.
        like: the engine (as for ``update``) whose layers decide, or a list of engines that keep the
            same ones; on ranks that do not lead, None.
        group: where the job has several ranks, those that call together, by default all.

    Returns:
        the tensors in question, and a check of the engine's codes.

    Raises:
        EngineError: an engine cannot be reached, has no weights yet, or keeps other layers in FP8
            than the first.
        ManifestError: the model has not the layers that the engine keeps in FP8.
        ValueError: a layer is of a kind that is not known, or sharded already.
    """
    ranks = ranks_of([], group_of(group))
    leader = Leader(ranks)
    remedy = "start all with the same options for layers in FP8 and the dtype"
    layout: Any = leader.share(leader.attempt(_of_all, like, _layout_of, remedy))
    names, dtype = set(layout["names"]), getattr(torch, layout["dtype"])
    attention_hooks.install()  # a model may be compiled before there are KV scales
    return replace(convert_layers(model, names, dtype, FORMATS[layout["format"]]), ranks=ranks)


def convert_layers(
    model: nn.Module, names: set[str], dtype: torch.dtype, format_: WeightFormat = QUANTIZED
) -> FP8Forward:
    """``fp8_forward`` for an engine that keeps these HF tensors in a format; nothing is asked."""
    from trainer_bridge.fp8.fp8_layers import (  # torch._dynamo, which takes a second
        check_kind,
        convert,
    )

    _refuse_adapters(model)
    if absorbed := next((n for n, _ in model.named_modules() if n.endswith("kv_b_proj")), None):
        raise ValueError(
            f"{absorbed} is of MLA, whose engine attends to latents and rounds otherwise than the "
            f"model; fp8_forward does not know it, so train this model without"
        )
    family, found, modules = hf_names.model_type(model), set[str](), dict[str, nn.Module]()
    for prefix, module in named_modules(model):
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}"
            parts = {part for part, _ in hf_names.split(name, tuple(parameter.shape), family)}
            if parts & names:
                if parts - names:
                    raise ManifestError(
                        f"the engine keeps {min(parts & names)} in FP8 and {min(parts - names)} "
                        f"not, which are one parameter of the model; ignore both or none"
                    )
                found |= parts
                modules[prefix] = module
    if names - found or not names:
        raise ManifestError(
            f"the engine keeps {min(names - found, default='nothing')} in FP8, which is no "
            f"parameter of the model; pass a model of the engine's checkpoint"
        )
    for name, module in modules.items():
        check_kind(module, name)
    for name, module in modules.items():
        convert(module, name, dtype, format_)
    norms = convert_norms(model, dtype)
    logger.info("fp8_forward: %d tensors of %d modules, %d norms", len(found), len(modules), norms)
    return FP8Forward(model, dtype, tuple(sorted(found)), format=format_)


def _of_all(engines: Any, ask: Callable[[Participant], Answer], remedy: str) -> Answer:
    """What all engines answer alike."""
    first, *others = participants_of(engines)
    answer = ask(first)
    if odd := [each.name for each in others if ask(each) != answer]:
        raise EngineError(f"{odd[0]} differs from {first.name}; {remedy}")
    return answer


def _layout_of(engine: Participant) -> dict[str, Any]:
    layout = engine.connection.layout()
    format_ = format_of_codes(layout).name
    names = layout["formats"].get(format_)
    if not names:
        raise EngineError(
            f"{engine.name} keeps no layer in block FP8, or does not know yet; update it first, "
            f"and start it with --fp8rl-format block-fp8 or block-fp8-ue8m0"
        )
    return {"names": sorted(names), "dtype": layout["dtype"], "format": format_}


def _kv_scales_of(engine: Participant) -> Sequence[tuple[float, float] | None] | None:
    """Of K and V in each layer, None of an INT8 cache's; None of a BF16 cache."""
    kv_cache = engine.connection.layout()["kv_cache"]
    if kv_cache is None:
        return None
    if kv_cache.get("format") == INT8:
        return [None] * kv_cache["layers"]
    scales = scales_in(engine.name, engine.connection.client.control({"op": "kv"}))
    if scales is None:
        raise EngineError(
            f"{engine.name} measures its KV scales at the first prefill after an update, which has "
            f"not come yet; call it after a rollout, or give kv_scales to update"
        )
    return scales


def _computed_with(model: nn.Module) -> Named:
    _refuse_adapters(model)
    return named_tensors(model)


def _refuse_adapters(model: nn.Module) -> None:
    if has_adapters(model):
        raise ValueError(
            "the model has adapters of PEFT, which are computed in BF16 beside the codes, while an "
            "engine has codes of merged weights; with fp8_forward, train whole weights"
        )


def _raise_first(faults: list[Exception | None]) -> None:
    for fault in filter(None, faults):
        raise fault


def _sums_of(engines: Any, format_: WeightFormat) -> dict[str, Sums]:
    """Of each engine, by what errors call it."""
    found: dict[str, Sums] = {}
    for each in participants_of(engines):
        # not the layout that is known: an engine may have restarted
        theirs = format_of_codes(each.connection.client.control({"op": "layout"}))
        if theirs.name != format_.name:
            raise EngineError(
                f"{each.name} computes in {theirs.name} and this forward in {format_.name}; start "
                f"it with --fp8rl-format {format_.name}"
            )
        reply = each.connection.client.control({"op": "code_sums"})
        sums: Any = reply.get("sums")
        check_fields(f"the reply of {each.name}", reply, {"sums": isinstance(sums, dict)})
        found[each.name] = sums
    return found


def _add_sums(
    ours: dict[tuple[str, str], torch.Tensor],
    source: Source,
    whole: torch.Tensor,
    forward: FP8Forward,
) -> None:
    """Of what an update reads from one source: codes, scales, or a weight to be quantized."""
    (scales,) = QUANTIZED.suffixes
    for name, cut in source.cuts:
        part, (owner, suffix) = cut(whole), split_name(name)
        if part.dtype in QUANTIZED.dtypes:
            ours[name, ""] = code_sum(part)
        elif suffix:
            ours[owner, suffix] = scale_sum(part)
        else:  # as each rank quantizes what FSDP2 gathered as it is
            encoded = forward.format.encode(part.to(forward.dtype))
            ours[name, ""], ours[name, scales] = code_sum(encoded[""]), scale_sum(encoded[scales])


def _compare(ours: dict[tuple[str, str], torch.Tensor], theirs: dict[str, Sums]) -> None:
    (scales,) = QUANTIZED.suffixes
    values = torch.stack(list(ours.values())).tolist()  # one wait for all
    found = {key: total([value]) for key, value in zip(ours, values, strict=True)}
    names = {name for name, _ in found}
    for engine, sums in theirs.items():
        odd = {name for name in names if sums.get(name) != [found[name, ""], found[name, scales]]}
        odd |= sums.keys() - names
        if odd:
            raise EngineError(
                f"{len(odd)} of {len(names | sums.keys())} tensors differ between this forward and "
                f"{engine}, {min(odd)} among them; update the engine to these weights, and change "
                f"them by an optimizer or in place, not through .data"
            )
