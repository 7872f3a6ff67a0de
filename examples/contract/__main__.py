"""The contract of adapters, on the smallest adapter there is and a real engine, without a GPU.

    python -m examples.trl.tiny_model MODEL
    sglang serve --model-path MODEL --quantization fp8rl --max-total-tokens 16384 --port 30000 &
    python -m examples.contract MODEL http://127.0.0.1:30000

A framework's own test has its adapter in the place of this one.
"""

import secrets
import sys
from pathlib import Path

from safetensors.torch import load_file

from trainer_bridge import update
from trainer_bridge.adapters import contract
from trainer_bridge.adapters.rollouts import whole_rollout
from trainer_bridge.adapters.updates import next_version
from trainer_bridge.rollouts.sampling import check_sampling

SAMPLING = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}


class Adapter:
    """One training: its run, its versions, its rollouts."""

    def __init__(self, engine: str) -> None:
        self.engine, self.run, self.version = engine, secrets.token_hex(4), -1

    def sync(self, weights: contract.Pairs, step: int | None) -> int:
        self.version = next_version(step, self.version)
        update(weights, self.engine, version=self.version, run=self.run)
        return self.version

    def sample(self) -> list[int]:
        return whole_rollout(self.engine, [[51, 43, 53]], SAMPLING, self.version).versions[0]


def main(model: Path, engine: str) -> None:
    tensors = load_file(model / "model.safetensors")
    adapter = Adapter(engine)

    def walk() -> contract.Pairs:
        return iter(tensors.items())

    def start() -> contract.Sync:
        nonlocal adapter
        adapter = Adapter(engine)
        return adapter.sync

    contract.check_weights(walk, model)
    contract.check_engine(engine)
    contract.check_updates(engine, walk, adapter.sync, lambda: adapter.sample())
    contract.check_resume(engine, walk, start, lambda: adapter.sample())
    contract.check_refusals(lambda given: check_sampling({**SAMPLING, **given}), contract.CHANGING)
    print("the adapter keeps the contract")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) == 3 else sys.exit(__doc__)
