"""What an engine's processes import, for the server that forks them (``harness.EngineProcess``).

SGLang spawns an engine's processes, and each imports it anew: 60 CPU seconds for an engine that
then runs for a few. The plugin is not loaded here: it is where an engine starts.
"""

import sglang.srt.entrypoints.engine
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401  it imports every model

import sgl_fp8rl.engine.hooks  # noqa: F401
