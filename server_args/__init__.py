"""Options of the FP8 rollout engine: ``--fp8rl-*`` flags and ``FP8RL_*`` variables; stdlib only."""

from server_args.args import Fp8RLServerArgs, env_name, flag_name
from server_args.layers import matches

__all__ = ["Fp8RLServerArgs", "env_name", "flag_name", "matches"]
