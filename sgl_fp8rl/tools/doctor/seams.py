"""Where training frameworks are touched, for ``doctor``: their versions, symbols and pins.

Nothing here imports a framework. An import costs seconds, runs plugins and needs a GPU's driver in
some, and one that fails says nothing of the symbols; so these are looked up in the source, which
takes milliseconds. Names are found so, and neither signatures nor whether an import works.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Framework:
    """What an adapter, or a documented call, uses of a framework."""

    version: str
    """The version that it was written for."""
    symbols: tuple[str, ...]
    """``module:name`` or ``module:Class.attribute``; the attribute may be set on ``self``."""
    needs: tuple[str, ...] = ()
    """Distributions that must be installed beside it."""
    extra: str = ""
    """The framework's own extra whose pins count as well."""
    limits: tuple[str, ...] = ()
    """Requirements that its metadata leaves out, of what may be installed beside it."""
    source: str = ""
    """Where pip finds that version, if not on PyPI."""


def _members(module: str, owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{owner}.{name}" for name in names)


def _slime(package: str) -> tuple[str, ...]:
    """slime and its fork miles: the replaced class, the key, what streams, and the ranks."""
    backend = f"{package}.backends.megatron_utils"
    weights = f"{backend}.update_weight.hf_weight_iterator_base"
    return (
        f"{backend}.actor:UpdateWeightFromDistributed",
        f"{backend}.initialize:init",
        *_members(weights, "HfWeightIteratorBase", "create", "get_hf_weight_chunks"),
        f"{package}.utils.distributed_utils:get_gloo_group",
    )


_SGLANG_IN_VERL = "verl.workers.rollout.sglang_rollout"
_TRAINERS_OF_VERL = "verl.trainer.ppo.v1"
_SLIME_NEEDS = ("sglang", "ray", "megatron-core")

FRAMEWORKS = {
    "trl": Framework(
        "1.16.0",
        (
            *_members(
                "trl.trainer.grpo_trainer",
                "GRPOTrainer",
                *("use_vllm", "vllm_mode", "vllm_generation", "_last_loaded_step"),
                *("_generate_and_score_completions", "_metrics", "_dist", "_is_vlm"),
                *("vllm_importance_sampling_mode", "vllm_importance_sampling_correction"),
                *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
                *("max_completion_length", "eos_token_ids", "tools", "loss_type"),
                *("rollout_func", "_calculate_rewards"),
            ),
            *_members(
                "trl.trainer.grpo_config",
                "GRPOConfig",
                *("vllm_structured_outputs_regex", "generation_kwargs"),
            ),
            *_members("trl.distributed", "DistributedBackend", "fsdp_version", "is_zero3"),
            *_members(
                "trl.generation.vllm_generation", "VLLMGeneration", "sync_weights", "generate"
            ),
        ),
        needs=("sglang", "transformers", "accelerate"),
    ),
    "verl": Framework(
        "0.9.1",
        (
            "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
            *_members(
                "verl.workers.rollout.replica", "RolloutReplicaRegistry", "register", "_registry"
            ),
            "verl.workers.rollout.replica:TokenOutput.extra_fields",
            *_members(
                f"{_SGLANG_IN_VERL}.sglang_rollout",
                "ServerAdapter",
                *("update_weights", "server_actor", "_init_server_adapter"),
                "_is_server_tp_leader",
            ),
            f"{_SGLANG_IN_VERL}.async_sglang_server:ServerArgs",
            f"{_SGLANG_IN_VERL}.async_sglang_server:SGLangReplica.server_class",
            *_members(
                f"{_SGLANG_IN_VERL}.async_sglang_server",
                "SGLangHttpServer",
                *("launch_server", "generate", "set_global_steps", "config"),
                *("tokenizer_manager", "scheduler_info"),
            ),
            f"{_TRAINERS_OF_VERL}.trainer_base:register_trainer",
            f"{_TRAINERS_OF_VERL}.trainer_base:PPOTrainer.step",
            f"{_TRAINERS_OF_VERL}.trainer_sync:PPOTrainerSync",
        ),
        needs=("sglang", "ray", "tensordict"),
        extra="sglang",
        # its FSDP engine imports AutoModelForCausalLMWithValueHead where there is a TRL
        limits=("trl<1.13",),
    ),
    "slime": Framework(
        "0.3.1",
        _slime("slime"),
        needs=_SLIME_NEEDS,
        limits=("numpy<2",),  # the Megatron of its image
        source="git+https://github.com/THUDM/slime@624b824a8",
    ),
    "miles": Framework(
        "0.1.0",
        _slime("miles"),
        needs=_SLIME_NEEDS,
        source="git+https://github.com/radixark/miles@31f1ca961",
    ),
    "mbridge": Framework(
        "0.15.1",
        (
            *_members("mbridge.core.auto_bridge", "AutoBridge", "from_config", "from_pretrained"),
            "mbridge.core.bridge:Bridge.export_weights",
        ),
        needs=("megatron-core", "transformers"),
    ),
    "megatron-core": Framework(
        "0.16.1", ("megatron.core.parallel_state:initialize_model_parallel",)
    ),
}
"""By the name of the distribution."""
NO_ADAPTER = ("nemo-rl", "areal", "rllm", "openrlhf", "prime-rl", "skyrl", "megatron-bridge")
"""By the name of the distribution. Not ROLL: its name, roll, is that of another project on PyPI."""


def installed(distribution: str) -> str | None:
    """Its version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def install_command(distribution: str) -> str:
    """How to get the version of the adapter and keep SGLang's own packages."""
    framework = FRAMEWORKS[distribution]
    return f"pip install --no-deps {framework.source or f'{distribution}=={framework.version}'}"


def missing_symbols(symbols: tuple[str, ...]) -> list[str]:
    """Those that the installed sources do not have; a module without readable source once."""
    names = {module: _names(module) for module in {s.partition(":")[0] for s in symbols}}
    missing = [module for module, found in names.items() if not found]
    for symbol in symbols:
        module, _, name = symbol.partition(":")
        if names[module] and name not in names[module]:
            missing.append(symbol.replace(":", "."))
    return sorted(missing)


def pin_clashes(distribution: str) -> list[str]:
    """Its requirements that the installed versions do not meet."""
    from packaging.requirements import Requirement  # every framework brings it

    framework = FRAMEWORKS[distribution]
    wanted = [*(metadata.requires(distribution) or []), *framework.limits]
    extras = {"", framework.extra}
    return [
        f"{need.name}{need.specifier} ({version} is installed)"
        for need in map(Requirement, wanted)
        if (version := installed(need.name.lower())) is not None
        and (need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras))
        and not need.specifier.contains(version, prereleases=True)
    ]


def _names(module: str) -> set[str]:
    """Names of a module, and ``Class.attribute``; nothing if its source cannot be read."""
    try:
        path = _source(module)
        tree = ast.parse(path.read_bytes()) if path else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return set()
    names = set(_bound(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in {*_bound(node), *_on_self(node)}}
    return names


def _source(module: str) -> Path | None:
    """The file of a module. ``find_spec`` sees the top level only: else it imports parents."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        stem = Path(folder, *rest)
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


def _bound(scope: ast.AST) -> Iterator[str]:
    """Names that a module's or a class's own code binds, not that of functions or classes in it."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        yield from _bound(node)


def _on_self(owner: ast.ClassDef) -> Iterator[str]:
    """Attributes that the methods of a class read or set on ``self``."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            yield node.attr
