"""Keep FlashInfer's plan of a decode step unchanged until the GPU has copied it.

FlashInfer plans a decode step (which block handles which part of which request) in one pinned
buffer of its wrapper and copies it to the GPU asynchronously (``PrefillPlan`` and ``DecodePlan`` in
flashinfer/include/flashinfer/attention/scheduler.cuh). SGLang's overlap scheduler plans step n + 1
once step n - 1 has ended. If other processes share the GPU, the copy of step n may still be pending
then: step n attends with the plan of step n + 1, and its samples do not come from the policy.

Waiting is almost free: the copy runs as soon as the previous step has ended.
"""

from typing import Any

import torch


def wait_for_copy(original: Any, updater: Any, wrapper: Any, *args: Any, **keywords: Any) -> None:
    """AROUND ``call_begin_forward`` of ``FlashInferIndicesUpdaterDecode`` and of its form for MLA:
    plan a step in ``wrapper`` after the GPU has copied the previous plan."""
    copied = getattr(wrapper, "fp8rl_copied", None)
    if copied is None:
        copied = wrapper.fp8rl_copied = torch.cuda.Event()
    copied.synchronize()  # returns at once if nothing was recorded
    original(updater, wrapper, *args, **keywords)
    copied.record()
