"""What SGLang asks of our quantization in a process that makes no model of it."""

from typing import Any, NoReturn

from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat


def overrides(hf_quant_cfg: Any, user_quant: str | None) -> str | None:
    """The name of our quantization where the user asked for it and a checkpoint is FP8."""
    if user_quant == NAME and (hf_quant_cfg or {}).get("quant_method") == "fp8":
        return NAME
    return None


class QuantizationName:
    """In the place of ``FP8RLConfig`` until ``activate.py`` puts it there."""

    override_quantization_method = staticmethod(overrides)

    @classmethod
    def from_config(cls, config: Any = None) -> NoReturn:
        """Refuse to make a model without our hooks."""
        raise compat.IncompatibleSGLangError(
            f"SGLang {compat.sglang_version()} makes an fp8rl model in a process where it did not "
            f"publish the engine's arguments to sgl-fp8rl; start the engine by sglang serve, "
            f"sglang.launch_server or sglang.Engine"
        )

    get_config_filenames = from_config
