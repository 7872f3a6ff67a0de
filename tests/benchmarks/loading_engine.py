"""An engine of a few lines in the place of SGLang's: it keeps what it is sent."""

from typing import Any

import torch


class LoadingEngine:
    """Stands for ``sglang.Engine``, whose ranks each keep what they were sent last."""

    def __init__(self, ranks: int = 1) -> None:
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.version: int | None = None
        self.flushes: list[bool] = []
        self.refuses = ""
        self.begin_weight_update = self.end_weight_update = lambda: (True, "")

    def update_weights_from_tensor(
        self, payloads: list[str], load_format: str, flush_cache: bool
    ) -> tuple[bool, str]:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        assert load_format == "flattened_bucket"
        for held, payload in zip(self.held, payloads, strict=not self.refuses):
            bucket = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(payload))
            held |= {name: tensor.clone() for name, tensor in bucket.reconstruct_tensors()}
        self.flushes.append(flush_cache)
        return not self.refuses, self.refuses

    def generate(self, **payload: Any) -> list[dict[str, Any]]:
        """Logprobs that are a norm of the weights, the same on each rank."""
        first, *others = self.held
        assert all(torch.equal(each[name], first[name]) for each in others for name in first)
        norm = first["model.norm.weight"].tolist()
        meta: dict[str, Any] = {"input_token_logprobs": [(value, 0, None) for value in norm]}
        if self.version is not None:
            meta["policy_version"] = [self.version]
        return [{"meta_info": meta}]

    def shutdown(self) -> None: ...
