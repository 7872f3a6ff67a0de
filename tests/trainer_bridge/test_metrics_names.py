"""What metrics are called here and in other frameworks, and when they are read from the GPU."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_bridge.framework_names import NAMES
from trainer_bridge.correction import CorrectionConfig, correct_logprobs
from trainer_bridge.correction.config import REJECTIONS
from trainer_bridge.metrics.reducer import Reducer, Values

EVERYTHING = CorrectionConfig(
    rollout_is_batch_normalize=True, rollout_rs=dict.fromkeys(REJECTIONS, 1.5), veto_threshold=0.5
)


def some_metrics(versions: bool = True) -> dict[str, float]:
    trainer_BT, mask_BT = torch.linspace(-1, 0, 40).view(2, 20), torch.ones(2, 20).bool()
    versions_BT = torch.tensor([[4], [7]]).expand(2, 20) if versions else None
    given = trainer_BT, trainer_BT.flip(1), mask_BT, EVERYTHING
    return correct_logprobs(*given, versions_BT=versions_BT).metrics


def test_every_name_in_the_table_of_the_docs_is_computed() -> None:
    shown = {name.replace("<option>", "seq_mean_k3") for name in NAMES}
    assert len(shown) > 20 and shown <= some_metrics().keys()


def test_metrics_are_a_flat_dict_of_floats() -> None:
    """As loggers take them."""
    assert {type(value) for value in some_metrics().values()} == {float}


class WaitsForTheDevice(TorchDispatchMode):
    """Notes operations whose result the host must read before it goes on."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if any(wait in name for wait in self.waits):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_before_all_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for the GPU a batch: what the last copy to the host is."""
    with WaitsForTheDevice() as mode:
        before_reduce: list[list[str]] = []
        reduce = Reducer.reduce

        def noted(reducer: Reducer, group: Any) -> Values:
            before_reduce.append(list(mode.seen))
            return reduce(reducer, group)

        monkeypatch.setattr(Reducer, "reduce", noted)
        some_metrics(versions=False)
        assert before_reduce == [[]]
        some_metrics(versions=True)
        assert before_reduce[1]  # control: which versions there are is asked before
