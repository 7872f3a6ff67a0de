"""Now ``trainer_bridge.adapters.trl``."""

import sys

from trainer_bridge.adapters import trl

sys.modules[__name__] = trl
