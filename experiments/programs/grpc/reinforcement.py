"""Observers, each in a world of its own, ask an agent for every move and tell it what the move was worth."""

import pickle
import threading
from concurrent import futures

import grpc

from .. import tasks


def service(name, methods, address, threads):
    library = grpc.server(futures.ThreadPoolExecutor(threads))
    handlers = {
        each: grpc.unary_unary_rpc_method_handler(method, pickle.loads, pickle.dumps) for each, method in methods.items()
    }
    library.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    library.add_insecure_port(address)
    library.start()
    return library


def method(channel, name):
    return channel.unary_unary(name, pickle.dumps, pickle.loads)


class Observer:
    def __init__(self, channel):
        self.choose, self.reward = method(channel, "/Agent/choose"), method(channel, "/Agent/reward")
        self.ended = threading.Event()

    def play(self, request, context):
        world = tasks.World()
        for _ in range(tasks.LONGEST):
            reward, over = world.move(self.choose(world.state()))
            self.reward(reward)
            if over:
                break
        return True

    def stop(self, request, context):
        self.ended.set()
        return True


def observe(agent, address):
    with grpc.insecure_channel(agent) as channel:
        observer = Observer(channel)
        library = service("Observer", {"play": observer.play, "stop": observer.stop}, address, 1)
        observer.ended.wait()
        library.stop(grace=5).wait()


class Agent(tasks.Learner):
    def answer(self, request, context):
        return self.choose(request)

    def take(self, request, context):
        self.reward(request)
        return True


def learn(address, observers):
    agent, worth = Agent(), []
    library = service("Agent", {"choose": agent.answer, "reward": agent.take}, address, tasks.WORKERS)
    channels = [grpc.insecure_channel(each) for each in observers]
    play = [method(channel, "/Observer/play") for channel in channels]
    for game in range(tasks.STEPS * tasks.WORKERS):
        play[game % tasks.WORKERS](True, wait_for_ready=True)
        worth.append(agent.learn())
    for channel in channels:
        method(channel, "/Observer/stop")(True)
        channel.close()
    library.stop(grace=5).wait()
    return worth


def run(rank, place):
    agent, observers = f"unix:{place}/agent", [f"unix:{place}/observer{each}" for each in range(tasks.WORKERS)]
    if rank == 0:
        return learn(agent, observers)
    observe(agent, observers[rank - 1])
    return None
