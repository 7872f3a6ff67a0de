"""Now ``trainer_bridge.adapters.contract``."""

import sys

from trainer_bridge.adapters import contract

sys.modules[__name__] = contract
