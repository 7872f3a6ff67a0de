"""The tiles of experts that this package ships, for stock SGLang: as if it were tuned here."""

import json
import os
from pathlib import Path

import torch
import triton

from sgl_fp8rl.engine.gemm.expert_tiles import FILES, SHIPPED
from sgl_fp8rl.engine.gemm.tune_cache import Machine


def give_stock(folder: Path) -> None:
    """Have engines that this process starts read them, from SGLang's own kind of file.

    SGLang loads the weights of the second GEMM through a TMA descriptor where its tile says so;
    those of the first too in 0.5.23, but not in 0.5.17, whose kernel refuses the word.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    up_takes_tma = hasattr(fused_moe, "_moe_support_tma")
    machine = Machine.here(0)
    shipped, _ = FILES.shipped(machine, SHIPPED / f"{machine.slug}.json")
    if not shipped:
        raise RuntimeError(f"this package has no tiles of experts for the {machine.gpu}")
    files = folder / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    files.mkdir(parents=True)
    gpu = torch.cuda.get_device_name(0).replace(" ", "_")
    for shape, pairs in shipped.items():
        name = (
            f"E={shape.experts},N={shape.intermediate},device_name={gpu},"
            f"dtype=fp8_w8a8,block_shape=[128, 128]"
        )
        up = {
            pair.m: {k: v for k, v in pair.up.items() if up_takes_tma or k != "USE_TMA"}
            for pair in pairs
        }
        (files / f"{name}.json").write_text(json.dumps(up))
        down = {pair.m: dict(pair.down) for pair in pairs}
        (files / f"{name}_down.json").write_text(json.dumps(down))
    os.environ["SGLANG_MOE_CONFIG_DIR"] = str(folder)
