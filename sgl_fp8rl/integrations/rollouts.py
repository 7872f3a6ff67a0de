"""Now ``trainer_bridge.adapters.rollouts``."""

import sys

from trainer_bridge.adapters import rollouts

sys.modules[__name__] = rollouts
