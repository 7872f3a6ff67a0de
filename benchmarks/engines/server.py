"""Engines that are servers: processes of their own, which start, and are updated, side by side."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.engines.keywords import Keywords

HOST = "127.0.0.1"
START_S = 300.0
REPLY_S = 120.0


class Server:
    """A server of this host, of the ``config.json`` in ``folder``; the port behind its own is
    NCCL's."""

    def __init__(self, folder: Path, keywords: Keywords, port: int, log: Path) -> None:
        self.address = f"http://{HOST}:{port}"
        place = {"model_path": folder, "host": HOST, "port": port, "nccl_port": port + 1}
        command = [sys.executable, "-m", "sglang.launch_server", *flags(place | keywords)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)

    def await_start(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(1)
        raise RuntimeError("the engine did not start; see the log")

    def generate(self, **payload: Any) -> list[dict[str, Any]]:
        """As ``sglang.Engine.generate``, of a batch."""
        body = json.dumps(payload).encode()
        request = urllib.request.Request(
            f"{self.address}/generate", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
            replies: list[dict[str, Any]] = json.load(reply)
            return replies

    def shutdown(self) -> None:
        """End it, and wait for its end."""
        self._process.terminate()
        self._process.wait()


def flags(keywords: Keywords) -> list[str]:
    """Keywords of ``sglang.Engine`` as the command line has them."""
    words: list[str] = []
    for name, value in keywords.items():
        if value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    return words
