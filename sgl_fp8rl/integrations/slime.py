"""Now ``trainer_bridge.adapters.slime``."""

import sys

from trainer_bridge.adapters import slime

sys.modules[__name__] = slime
