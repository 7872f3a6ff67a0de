"""Now ``trainer_bridge.adapters.updates``."""

import sys

from trainer_bridge.adapters import updates

sys.modules[__name__] = updates
