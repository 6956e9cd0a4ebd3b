"""Asynchronous actor-critic learning (A3C): a global network at a server, actors that fetch it and push gradients."""
