"""For one release, where ``check_sampling`` was: it is in ``trainer_bridge.rollouts.sampling``."""

from trainer_bridge.rollouts.sampling import check_sampling as check_sampling
