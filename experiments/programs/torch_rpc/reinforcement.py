"""Observers, each in a world of its own, ask an agent for every move and tell it what the move was worth."""

import torch.distributed.rpc as rpc

from .. import tasks


def play(agent):
    world, ask = tasks.World(), agent.rpc_sync()
    for _ in range(tasks.LONGEST):
        reward, over = world.move(ask.choose(world.state()))
        ask.reward(reward)
        if over:
            break


def learn():
    agent, worth = rpc.RRef(tasks.Learner()), []
    for game in range(tasks.STEPS * tasks.WORKERS):
        rpc.rpc_sync(f"observer{game % tasks.WORKERS}", play, (agent,))
        worth.append(agent.local_value().learn())
    return worth


def run(rank, place):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/store")
    name = f"observer{rank - 1}" if rank else "agent"
    rpc.init_rpc(name, rank=rank, world_size=tasks.WORKERS + 1, rpc_backend_options=options)
    worth = learn() if rank == 0 else None
    rpc.shutdown()
    return worth
