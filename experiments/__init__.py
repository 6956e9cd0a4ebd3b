"""What rdmarpc shows: one training job and benchmarks, hydra apps with their configs under `conf/`.

`python -m experiments.train` trains a digits model split over worker processes; `python -m experiments.bench` puts
every latency beside its physical floor and beside torch RPC, and `experiments.cuda` does so for tensors on GPUs. Installed,
the same modules are `rdmarpc.experiments`.
"""
