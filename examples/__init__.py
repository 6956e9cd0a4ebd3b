"""Programs with rdmarpc, each in one file to be read from top to bottom: ``python -m examples.NAME``. Each starts its own
workers on this machine, says what it reached, and fails if that is not what it should be.

``parameter_server``        trainers send gradients to a server that answers several of them at once
``served``                  two trainers whose weights a parameter server keeps, in forty lines
``reinforcement_learning``  observers play, one agent decides and learns
``pipeline``                a model trained across two workers, then served by both at once
``language_model``          a transformer in two stages, trained with micro-batches and distributed autograd
``trainers``                Lightning, transformers and accelerate train a wrapped model, to the bit as in one process
``cuda_rpc``                activations and gradients from GPU to GPU; needs a GPU
``recommendation``          tables on parameter servers, the dense part on every trainer, trained with distributed autograd
"""
