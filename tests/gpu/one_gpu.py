"""SGLang's server with all its ranks on one GPU: ``python -m tests.gpu.one_gpu``, flags as ever.

NCCL refuses two ranks on one GPU of a host, so each process says that it is a host of its own
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_HOSTID). They then talk
over sockets: results are those of two GPUs, speed is not.
"""

import os
import runpy

# in the ranks too, which import this module before they start
os.environ["NCCL_HOSTID"] = str(os.getpid())


def allow(record: type) -> None:
    """Have SGLang's records name the first GPU for each rank, once they are checked."""
    check = record.check_server_args  # type: ignore[attr-defined]

    def checked(arguments: object) -> None:
        check(arguments)
        # refused as a flag and frozen by now; a dataclass, or a Struct of msgspec
        super(record, arguments).__setattr__("gpu_id_step", 0)  # type: ignore[misc]

    record.check_server_args = checked  # type: ignore[attr-defined]


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before this import, as SGLang does: they add flags
    from sglang.srt.server_args import ServerArgs

    allow(ServerArgs)
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
