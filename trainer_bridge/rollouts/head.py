"""Logprobs and entropies, computed in chunks of tokens inside a model's head: the logits of all
tokens are never in memory.

While the model runs, its head has another forward, inside its hooks (of FSDP2, say). It computes
what is asked for, and returns known numbers in place of logits. What the model makes of these is
compared with what its config says (a factor, a cap). A model that does anything else is run again,
and from then on computes all logits. Where there are several ranks, that is found out once in a
pass without gradient, so that all run the same number of passes, whatever each of them finds.

Shapes: B sequences, L tokens of the longest, N tokens that are asked for, C of a chunk, H hidden, V
vocabulary.
"""

import logging
from contextlib import suppress
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from trainer_bridge.rollouts.chunks import After, Asked, Found, Scores, logits_dtype

logger = logging.getLogger(__name__)

ROUNDINGS = 4
"""Machine epsilons between what a model makes of a number and the same in FP32. Healthy: 2."""
_LOGITS_ERRORS = AssertionError, LookupError, RuntimeError, TypeError, ValueError
"""Of a model that reads its logits, at numbers of another shape."""


def _numbers(vocabulary: int, hidden: torch.Tensor) -> torch.Tensor:
    """[2, 2, V] from -100 to 100 in halves, which BF16 has exactly, neighbours far apart."""
    count = torch.arange(4 * vocabulary, device=hidden.device).view(2, 2, vocabulary)
    return ((count * 37) % 401 - 200).to(logits_dtype(hidden)) / 2


def _nothing_of(x: torch.Tensor) -> torch.Tensor:
    """0 in FP32, with a gradient of 0 for ``x``, even where that is NaN."""
    return torch.where(x.new_zeros((), dtype=torch.bool), x.sum().float(), 0.0)


def _setting() -> Any:
    """What is another one inside a checkpoint, whose second pass would find the head's own forward,
    and in another thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return get_ident(), torch.is_grad_enabled(), hooks


class _Pass:
    """One forward pass of a model whose head computes what is asked for, or nothing."""

    def __init__(
        self, head: nn.Linear, after: After, tokens_BL: torch.Tensor, asked: Asked | None = None
    ) -> None:
        self.head, self.after, self.tokens_BL, self.asked = head, after, tokens_BL, asked
        self.found: Found | None = None
        self.numbers: torch.Tensor | None = None
        """What the head returned; None where it computed logits."""
        self.calls = 0

    def run(self, model: nn.Module, is_first: bool) -> Any:
        """The model's output, or None of a model that fails at the numbers in the first pass."""
        self.setting = _setting()
        vars(self.head)["forward"] = self._forward
        try:
            return model(self.tokens_BL, use_cache=False)
        except _LOGITS_ERRORS as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)  # tells nothing of logits
            if not is_first or self.numbers is None or out_of_memory:
                raise
            return None
        finally:
            vars(self.head).pop("forward", None)

    @torch.no_grad()
    def without_effect(self, model: nn.Module) -> Any:
        """As ``run``, over the same tokens, which hooks (of router replay, say) may count. Random
        numbers stay those of the pass that follows."""
        devices = {p.device.index for p in model.parameters() if p.is_cuda}
        if torch.cuda.is_initialized():
            devices.add(torch.cuda.current_device())
        with torch.random.fork_rng(sorted(devices)):
            output = self.run(model, is_first=True)
        torch.clear_autocast_cache()  # of casts without a gradient, which the next pass would take
        return output

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        # tensor parallelism and quantized weights have other types, and products of their own
        types = {type(input), type(self.head.weight)}
        self.calls += get_ident() == self.setting[0]
        if (
            self.calls > 1
            or input.shape[:-1] != self.tokens_BL.shape
            or not types <= {torch.Tensor, nn.Parameter}
            or _setting() != self.setting
        ):
            return nn.Linear.forward(self.head, input)
        numbers = _numbers(len(self.head.weight), input)
        if self.asked is not None:
            scores: Any = Scores.apply
            asked = self.asked.on(input.device)
            self.found = [*scores(self.after, asked, input, self.head.weight, self.head.bias)]
            # connected, so that hooks on the model's output see the backward pass
            numbers = numbers + _nothing_of(self.found[0]).to(numbers.dtype)
        self.numbers = numbers.detach().clone()  # the model may write into those that it gets
        return numbers

    def is_known(self, output: Any) -> bool:
        """Whether the model made of the numbers what its config says, and nothing else."""
        logits, numbers = getattr(output, "logits", None), self.numbers
        if self.calls != 1 or numbers is None or not isinstance(logits, torch.Tensor):
            return False
        wanted = self.after.apply(numbers.to(logits.device, torch.float32, copy=True))
        most = ROUNDINGS * max(torch.finfo(x).eps for x in (numbers.dtype, torch.float32))
        return logits.shape == wanted.shape and bool(
            ((logits.detach() - wanted).abs() <= most * wanted.abs()).all()
        )


_known: "WeakKeyDictionary[nn.Module, tuple[ref[nn.Linear], After, bool]]" = WeakKeyDictionary()
"""Of each model: its head, what its config says, and whether that is so."""


def forward(model: Any, tokens_BL: torch.Tensor, asked: Asked) -> tuple[Any, Found | None]:
    """The model's output, and what is asked for, or None where the output has all logits.

    Raises:
        RuntimeError: the model did with its logits what it did not in its first pass.
    """
    head, after = _head_of(model) if isinstance(model, nn.Module) else (None, After())
    if head is None or bool((asked.targets_N >= head.out_features).any()):
        return model(tokens_BL, use_cache=False), None
    known = _known.get(model)
    is_first = known is None or known[:2] != (ref(head), after)
    if is_first and _several():
        _note(model, first := _Pass(head, after, tokens_BL), first.without_effect(model))
        is_first = False
    if not is_first and not _known[model][2]:
        return model(tokens_BL, use_cache=False), None
    own = _Pass(head, after, tokens_BL, asked)
    output = own.run(model, is_first)
    if is_first:
        _note(model, own, output)
    if own.numbers is None:
        return output, None
    if not own.is_known(output):
        if is_first:
            return model(tokens_BL, use_cache=False), None
        del _known[model]  # another pass here would leave the other ranks behind
        raise RuntimeError(
            "response_logprobs: the model does something else with the logits of its head than in "
            "its first call; call again, which looks anew"
        )
    assert own.found is not None
    end = _nothing_of(output.logits)
    return output, [x_N.to(end.device) + end for x_N in own.found]


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _note(model: nn.Module, first: _Pass, output: Any) -> None:
    _known[model] = ref(first.head), first.after, first.is_known(output)
    if not _known[model][2]:
        logger.warning(
            "response_logprobs: the model does something with the logits of its head that is not "
            "known here, so all logits are in memory at once (logged once a model)"
        )


def _head_of(model: nn.Module) -> tuple[nn.Linear | None, After]:
    """A plain linear head that no compiled module and no replica runs, and what follows it."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            break
        head: Any = None
        with suppress(NotImplementedError, AttributeError):  # transformers does not find it
            head = getattr(module, "get_output_embeddings", lambda: None)()
        if head is None:
            continue
        compiled = (m for m in model.modules() if _is_compiled(m))
        if (
            hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # not in old torch
            and isinstance(head, nn.Linear)
            and type(head).forward is nn.Linear.forward
            and "forward" not in vars(head)  # of accelerate, say
            and all(map(_is_of_torch, head._forward_hooks.values()))
            and not {**head._backward_hooks, **head._backward_pre_hooks}  # of gradients of logits
            and not any(m is head for c in compiled for m in c.modules())
        ):
            return head, After.of(getattr(module, "config", None))
        break
    return None, After()


def _is_of_torch(hook: Any) -> bool:
    """FSDP2's hook; that of an adapter may add to logits."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
