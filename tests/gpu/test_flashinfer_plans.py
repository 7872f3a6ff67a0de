"""Two decode steps laid out before the GPU begins the first, by FlashInfer as SGLang calls it."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine.attention.flashinfer_plans import wait_for_copy

BATCH, HEADS, GROUP, DIM = 8, 4, 4, 128
CONTEXTS = (2048, 256)
"""Of every request in the first and in the second step. The second's layout, taken for the first's
data, leaves out most of its tokens and reads nothing that is not there."""
BUSY_CYCLES = 100_000_000
"""Some 50 ms for which the GPU does other work, as if another process had it."""
WORKSPACE_BYTES = 128 << 20

Plan = Callable[..., None]


class Decoder:
    """One attention layer's decode with SGLang's updater and a wrapper of a captured batch size."""

    def __init__(self, plan: Plan) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        from flashinfer.decode import fast_decode_plan

        tokens, device = BATCH * CONTEXTS[0], "cuda"
        random = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=random, dtype=torch.bfloat16, device=device)
        self.q_BND = normal(BATCH, HEADS * GROUP, DIM)
        self.caches = tuple(normal(tokens, 1, HEADS, DIM) for _ in "kv")
        self._plan = plan
        self._kv_indptr = torch.zeros(BATCH + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(BATCH, device=device)
        # on the GPU beforehand, as SGLang's are: a copy would wait for it
        self._lengths_B = {
            context: torch.full((BATCH,), context, device=device) for context in CONTEXTS
        }
        ones = torch.ones(BATCH, dtype=torch.int32, device=device)
        slots = torch.arange(tokens, dtype=torch.int32, device=device)
        self._updater = SimpleNamespace(
            req_to_token=slots.view(BATCH, CONTEXTS[0]),
            kv_last_page_len=ones,
            num_qo_heads=HEADS * GROUP,
            num_kv_heads=HEADS,
            head_dim=DIM,
            data_type=torch.bfloat16,
            q_data_type=torch.bfloat16,
        )
        self._keywords = {"kv_start_idx": None, "spec_info": None}
        with suppress(ImportError):  # 0.5.17 has none and takes the rows
            from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

            table = self._updater.req_to_token
            translator = KVIndexTranslator(
                req_to_token=table,
                token_to_kv_pool_allocator=None,
                token_to_kv_pool=None,
                page_size=1,
                device=device,
            )
            self._updater.attn_backend = SimpleNamespace(kv_index_translator=translator)
            self._keywords |= {"plan": None, "req_pool_indices": self._rows}
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            # SGLang's own buffers, which a fast plan does not copy
            paged_kv_indptr_buffer=self._kv_indptr,
            paged_kv_indices_buffer=torch.zeros_like(slots),
            paged_kv_last_page_len_buffer=ones,
        )
        self.step(CONTEXTS[0])
        self._wrapper.begin_forward = partial(fast_decode_plan, self._wrapper)

    def step(self, context: int) -> torch.Tensor:
        """Lay out and queue a step; returns what it will have computed."""
        rows = () if "plan" in self._keywords else (self._rows,)
        self._plan(
            self._updater,
            self._wrapper,
            *rows,
            self._lengths_B[context],
            BATCH * context,
            self._kv_indptr,
            seq_lens_cpu=torch.full((BATCH,), context),
            **self._keywords,
        )
        out: torch.Tensor = self._wrapper.run(self.q_BND, self.caches)
        return out


def stock_plan() -> Plan:
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterDecode

    plan: Plan = FlashInferIndicesUpdaterDecode.call_begin_forward
    return plan


@pytest.mark.parametrize(
    ("hook", "as_alone"),
    [(None, [False, True]), (wait_for_copy, [True, True])],
    ids=["stock", "ours"],
)
def test_a_step_attends_by_its_own_plan(hook: Any, as_alone: list[bool]) -> None:
    """Stock is the control: its first step attends by the plan of the second."""
    decoder = Decoder(stock_plan() if hook is None else partial(hook, stock_plan()))
    alone = []
    for context in CONTEXTS:
        alone.append(decoder.step(context).clone())
        torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    ahead = [decoder.step(context) for context in CONTEXTS]
    torch.cuda.synchronize()
    assert [torch.equal(*pair) for pair in zip(ahead, alone, strict=True)] == as_alone
