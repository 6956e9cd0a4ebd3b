"""One worker that starts and leaves again: the program that `start.py` runs. Arguments: the module of its RPC layer,
its rank, and the file to meet through.

Says "ready" when everything is imported, waits for a line, joins, and says how many seconds that took and when it was done.
"""

import importlib
import json
import sys
import time
import warnings


def main(module: str, rank: int, meeting_file: str) -> None:
    rpc = importlib.import_module(module)
    rpc.init_rpc  # noqa: B018 (ours is loaded when a name is first used)
    print("ready", flush=True)
    if not sys.stdin.readline():  # the process that started us is gone
        sys.exit(1)

    begin = time.monotonic()
    make_options = rpc.RpcBackendOptions if module == "rdmarpc" else rpc.TensorPipeRpcBackendOptions
    options = make_options(init_method=f"file://{meeting_file}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    done = time.monotonic()
    print(json.dumps({"init_s": done - begin, "done": done}), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch warns of its own deprecated parts
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
