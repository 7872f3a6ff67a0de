"""Code that makes SGLang's ``ServerArgs`` itself: when it must load the plugins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}
PROGRAM = """
import sys
import sglang
from sglang.srt.server_args import ServerArgs
if sys.argv[2] == "first":
    from sglang.srt.plugins import load_plugins
    load_plugins()
server_args = ServerArgs(model_path=sys.argv[1], quantization="fp8rl", skip_tokenizer_init=True)
if hasattr(server_args, "resolve_once"):  # 0.5.23 calls it before it loads plugins
    server_args.resolve_once()
print("resolved", server_args.quantization)
"""


@pytest.mark.sglang
@pytest.mark.parametrize("load_plugins", ["first", "never"])
def test_plugins_come_before_server_args(load_plugins: str, tmp_path: Path) -> None:
    """SGLang verifies the name before it calls anything that a plugin could have registered."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    line = [sys.executable, "-c", PROGRAM, str(tmp_path), load_plugins]
    child = subprocess.run(line, capture_output=True, text=True, timeout=250)
    if load_plugins == "first":
        assert child.returncode == 0, child.stderr[-2000:]
        assert child.stdout.splitlines()[-1] == "resolved fp8rl"
    else:
        assert child.returncode != 0
        assert "Unknown quantization method: fp8rl" in child.stderr
