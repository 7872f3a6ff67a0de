"""What the processes of an engine import before they are forked (``forked.py``)."""

import sglang.srt.entrypoints.engine
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401  it imports every model

import sgl_fp8rl.engine.attention.hooks  # noqa: F401
