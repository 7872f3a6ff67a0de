"""FlashInfer's plan of a decode step stays as it is until the GPU has it.

FlashInfer lays a decode step out (which block takes which part of which request) in one pinned
buffer of its wrapper and copies it to the GPU asynchronously (``PrefillPlan`` and ``DecodePlan`` in
flashinfer/include/flashinfer/attention/scheduler.cuh). SGLang's overlapped scheduler lays out step
n + 1 once step n - 1 has ended. Where other processes share the GPU the copy of step n may still
wait then: step n attends by the layout of step n + 1, and samples from what is not the policy.

Waiting costs next to nothing: a step's copy is due as soon as the step before it has ended.
"""

from typing import Any

import torch


def wait_for_copy(original: Any, updater: Any, wrapper: Any, *args: Any, **keywords: Any) -> None:
    """AROUND ``FlashInferIndicesUpdaterDecode.call_begin_forward``: lay out a step in ``wrapper``
    when the GPU has copied the last one."""
    copied = getattr(wrapper, "fp8rl_copied", None)
    if copied is None:
        copied = wrapper.fp8rl_copied = torch.cuda.Event()
    copied.synchronize()  # at once, where nothing was recorded
    original(updater, wrapper, *args, **keywords)
    copied.record()
