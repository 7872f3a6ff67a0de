"""What every test shares: few threads, no network, and red runs that stay red."""

import os
import signal
import sys
from pathlib import Path

# Set before torch is imported, and inherited by every process that a test starts: the machines
# that run these tests have few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Checkpoints are made by the tests themselves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# `from tests import oracle` also where pytest was not started as `python -m pytest`.
sys.path.insert(0, str(Path(__file__).parents[1]))

from hypothesis import settings

# A pytest that is ended from outside still ends the servers that it started.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# Derandomized: a run that fails fails again. No database: tests leave no files behind.
settings.register_profile("fp8rl", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("fp8rl")
