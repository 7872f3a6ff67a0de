"""Router replay: the trainer uses the experts that the engine chose (docs/router_replay.md)."""

from trainer_bridge.router_replay.replay import RoutingRecord, record_routing, replay_routing

__all__ = ["RoutingRecord", "record_routing", "replay_routing"]
