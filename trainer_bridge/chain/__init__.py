"""Weights through a folder, for engines that no connection reaches: another data centre, late
joiners.

``ChainPublisher`` writes each version as what changed since the last one, and now and then whole;
``follow`` brings an engine to the newest version that a copy of the folder has.
"""

from trainer_bridge.chain.follower import ChainFollower, follow
from trainer_bridge.chain.index import ChainError
from trainer_bridge.chain.publisher import ChainPublisher

__all__ = ["ChainError", "ChainFollower", "ChainPublisher", "follow"]
