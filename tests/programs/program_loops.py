"""What random programs do around their models, as text at named points of a training loop (``drawn_programs.source``).

``unplaced``: before the model is placed; ``setup``: after; ``made``: the optimizer is there; ``batch``: a step begins;
``around``: what is entered around forward and loss; ``loss``: behind the loss; ``backward`` and ``step``: instead of these;
``grads``: before the optimizer's step; ``stepped``: after; ``caught``: the exception that a step may raise; ``end``.
"""

DRAWS = {"init", "gradient_noise", "input_noise"}
"""Those that draw random numbers where their tensors lie."""

OPTIMIZERS = [
    "SGD(PARAMS, lr=0.1, momentum=<0|0.9>, weight_decay=<0|0.01>, <foreach=True|foreach=False|fused=True|maximize=True>)",
    "SGD(PARAMS, lr=0.1, momentum=0.9, nesterov=True)",
    "Adam(PARAMS, lr=0.01, amsgrad=<True|False>, <foreach=True|foreach=False|fused=True|weight_decay=0.1>)",
    "Adam(PARAMS, lr=torch.tensor(0.01))",
    "AdamW(PARAMS, lr=0.01, <foreach=True|foreach=False|fused=True|amsgrad=True>)",
    "Adagrad(PARAMS, lr=0.05, <foreach=True|foreach=False|fused=True>)",
    "RMSprop(PARAMS, lr=0.01, centered=<True|False>, momentum=<0|0.5>, foreach=<True|False|None>)",
    "<NAdam|RAdam|Adamax|Adadelta|ASGD|Rprop>(PARAMS, lr=0.01, foreach=<True|False|None>)",
    "Adafactor(PARAMS, lr=0.01)",
    "LBFGS(net.parameters(), lr=0.1, max_iter=3, line_search_fn=<None|'strong_wolfe'>)",
]

LOSSES = {
    True: [  # the target is a class for every place
        "F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=<0.0|0.1>)",
        "F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.flatten())",
        "-out.log_softmax(-1).gather(-1, y[..., None]).mean()",
        "F.cross_entropy(out.mT, y, weight=torch.linspace(0.5, 1.5, V))",
        "F.multi_margin_loss(out.flatten(0, 1), y.flatten())",
    ],
    False: [
        "F.mse_loss(out, y)",
        "(out - y).pow(2).mean()",
        "F.smooth_l1_loss(out, y, reduction=<'sum'|'mean'>)",
        "F.binary_cross_entropy_with_logits(out, y.gt(0).to(out.dtype))",
        "F.kl_div(out.log_softmax(-1), y.softmax(-1), reduction='batchmean')",
        "1 - F.cosine_similarity(out, y, dim=-1).mean()",
    ],
}

FEATURES: dict[str, dict[str, str]] = {
    "evaluated": {
        "stepped": """
net.eval()
with torch.<no_grad|inference_mode>():
    keep("evaluated", read(net(x)))
net.train()
"""
    },
    "two_forwards": {"loss": "loss = loss + 0.5 * measure(read(net(x.flip(0))), y)"},
    "accumulated": {"grads": "measure(read(net(x.flip(1))), y).backward()"},
    "clip_norm": {
        "grads": """
norm = nn.utils.clip_grad_norm_(net.parameters(), <0.1|1.0>, <2.0|float('inf')>, foreach=<None|True|False>)
keep("norm", norm)
"""
    },
    "clip_value": {"grads": "nn.utils.clip_grad_value_(net.parameters(), 0.05, foreach=<None|True|False>)"},
    "averaged": {
        "setup": "average = torch.optim.swa_utils.AveragedModel(net, <use_buffers=True|device='cpu'>)",
        "stepped": "average.update_parameters(net)",
        "end": "keep('average', average)",
    },
    "shadow": {
        "setup": "shadow = {name: p.detach().clone() for name, p in net.named_parameters()}",
        "stepped": """
with torch.no_grad():
    for name, p in net.named_parameters():
        shadow[name].<lerp_(p, 0.1)|mul_(0.9).add_(p, alpha=0.1)|copy_(shadow[name] * 0.9 + p * 0.1)>
""",
        "end": "keep('shadow', shadow)",
    },
    "activations": {
        "<unplaced|setup>": "held = []\nnet.head.register_forward_hook(lambda module, args, out: held.append((args[0], out)))",
        "end": "keep('activations', held)",
    },
    "hook_scales": {"<unplaced|setup>": "net.head.register_forward_hook(lambda module, args, out: out * 1.5)"},
    "gradient_hook": {
        "<unplaced|setup>": "net.head.weight.register_hook(lambda g: <g * 0.5|g.clamp(-0.1, 0.1)|torch.sign(g)|None>)"
    },
    "post_accumulate": {
        "<unplaced|setup>": """
def halve(p):
    p.grad.<mul_(0.5)|clamp_(-0.1, 0.1)>
for p in trained(net):
    p.register_post_accumulate_grad_hook(halve)
"""
    },
    "in_backward": {
        "setup": """
def descend(p):
    p.data.add_(p.grad, alpha=-0.01)
    p.grad = None
net.inlet.weight.register_post_accumulate_grad_hook(descend)
"""
    },
    "backward_hook": {
        "setup": """
flowed = []
net.head.register_full_backward_hook(lambda module, gi, go: flowed.append(go[0].<sum()|clone()>))
net.head.register_full_backward_pre_hook(lambda module, go: (go[0] * 2,))
""",
        "end": "keep('flowed', flowed)",
    },
    "multi_hook": {
        "setup": """
norms = []
torch.autograd.graph.register_multi_grad_hook(
    [p for p in net.parameters() if p.requires_grad], lambda gs: norms.append([None if g is None else g.sum() for g in gs])
)
""",
        "end": "keep('norms', norms)",
    },
    "saved": {
        "around": "torch.autograd.graph.<save_on_cpu()|saved_tensors_hooks(lambda t: t.clone(), lambda t: t)"
        "|saved_tensors_hooks(lambda t: t.detach(), lambda t: t * 1)>"
    },
    "scheduled": {
        "made": "schedule = torch.optim.lr_scheduler.<StepLR(optimizer, 2, 0.5)|CosineAnnealingLR(optimizer, 5)"
        "|LambdaLR(optimizer, lambda n: 1 / (1 + n))|ExponentialLR(optimizer, 0.9)>",
        "stepped": "schedule.step()\nkeep('rate', schedule.get_last_lr())",
    },
    "plateau": {
        "made": "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        "stepped": "schedule.step(loss.detach())",
    },
    "scaler": {
        "made": "scaler = torch.amp.GradScaler('cpu', init_scale=<1.0|128.0|1e38>, growth_interval=1)",
        "backward": "scaler.scale(loss).backward()<\nscaler.unscale_(optimizer)|>",
        "step": "scaler.step(optimizer)\nscaler.update()\nkeep('scale', scaler.get_scale())",
    },
    "autocast": {"around": "torch.autocast('cpu', torch.bfloat16, cache_enabled=<True|False>)"},
    "anomaly": {"around": "torch.autograd.set_detect_anomaly(True)"},
    "penalty": {
        "loss": """
gradients = torch.autograd.grad(loss, trained(net), create_graph=True, allow_unused=True)
loss = loss + 0.01 * sum(g.pow(2).sum() for g in gradients if g is not None)
"""
    },
    "input_penalty": {
        "loss": """
if x.is_floating_point():
    point = x.detach().clone().requires_grad_()
    [slope] = torch.autograd.grad(read(net(point)).sum(), point, create_graph=True)
    loss = loss + 0.1 * (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
"""
    },
    "maml": {
        "loss": """
fast = dict(net.named_parameters())
inner = measure(read(torch.func.functional_call(net, fast, (x,))), y)
names = [name for name, p in fast.items() if p.requires_grad]
gradients = torch.autograd.grad(inner, [fast[name] for name in names], create_graph=True, allow_unused=True)
fast |= {name: fast[name] - 0.1 * g for name, g in zip(names, gradients) if g is not None}
loss = loss + measure(read(torch.func.functional_call(net, fast, (x,))), y)
"""
    },
    "hessian": {
        "stepped": """
params = trained(net)
gradients = torch.autograd.grad(measure(read(net(x)), y), params, create_graph=True, allow_unused=True)
total = sum((g * torch.ones_like(g)).sum() for g in gradients if g is not None)
keep("hessian", torch.autograd.grad(total, params, allow_unused=True))
"""
    },
    "per_sample": {
        "stepped": """
params = {name: p.detach() for name, p in net.named_parameters()}
def one(params, x, y):
    return measure(read(torch.func.functional_call(net, params, (x[None],))), y[None])
try:
    keep("per sample", torch.func.vmap(torch.func.grad(one), (None, 0, 0))(params, x, y))
except Exception as error:
    keep("per sample", error)
"""
    },
    "functional_gradient": {
        "stepped": """
params = {name: p.detach() for name, p in net.named_parameters()}
def whole(params):
    return measure(read(torch.func.functional_call(net, params, (x,))), y)
try:
    keep("functional", torch.func.<grad_and_value|grad>(whole)(params))
except Exception as error:
    keep("functional", error)
"""
    },
    "trips": {
        "setup": """
def trip(module, args):
    if module.training and step == 1:
        raise ValueError("tripped in a forward")
net.head.register_forward_pre_hook(trip)
""",
        "caught": "ValueError",
    },
    "trips_backward": {
        "setup": """
def trip(gradient):
    if step == 1:
        raise ValueError("tripped in a backward")
net.inlet.weight.register_hook(trip)
""",
        "caught": "ValueError",
    },
    "trips_shape": {
        "batch": "if step == 1:\n    y = y[:, :-1]",
        "caught": "(RuntimeError, ValueError, IndexError)",
    },
    "kept": {"setup": "losses = []", "loss": "losses.append(loss<|.detach()>)", "end": "keep('losses', losses)"},
    "kept_gradients": {
        "setup": "history = []",
        "grads": "history.append([p.grad for p in net.parameters()])",
        "end": "keep('history', history)",
    },
    "branch": {"loss": "if <loss.item()|loss|float(loss)> > 1.5:\n    loss = loss * 0.5"},
    "written": {"stepped": "keep('written', f'{loss.item():.6f} {net.head.weight.sum():.4f} {net.head.weight[0].tolist()}')"},
    "edited": {
        "stepped": """
with torch.no_grad():
    net.head.weight<.mul_(0.99)|[0].add_(0.01)|[:, ::2].neg_()|.clamp_(-0.3, 0.3)|.copy_(net.head.weight * 0.5)>
    net.head.weight[:, 1] += 0.01
"""
    },
    "data": {"stepped": "w = net.head.weight\nw.data<.mul_(0.9)|[0] = 0.5| = w.data * 0.9|.copy_(torch.ones_like(w))>"},
    "round_trip": {
        "stepped": """
if step == 0:
    state = <net.state_dict()|copy.deepcopy(net.state_dict())|{name: t.clone() for name, t in net.state_dict().items()}>
if step == 1:
    keep("loaded", str(net.load_state_dict(state, assign=<False|True>)))
"""
    },
    "file": {
        "stepped": """
if step == 0:
    file = io.BytesIO()
    torch.save(<net.state_dict()|{"net": net.state_dict(), "optimizer": optimizer.state_dict()}["net"]>, file)
if step == 1:
    file.seek(0)
    net.load_state_dict(torch.load(file))
"""
    },
    "optimizer_state": {
        "stepped": """
if step == 0:
    state_then = copy.deepcopy(optimizer.state_dict())
if step == 1:
    optimizer.load_state_dict(state_then)
"""
    },
    "ghost": {
        "stepped": """
if step == 1:
    ghost = copy.deepcopy(net)
    keep("ghost", measure(read(ghost(x)), y))
    keep("ghost", ghost)
"""
    },
    "swapped": {
        "stepped": """
if step == 1:
    net.head = nn.Linear(D, V)
    optimizer.add_param_group({"params": net.head.parameters()})
"""
    },
    "new_parameter": {
        "stepped": """
if step == 1:
    net.head.weight = nn.Parameter(net.head.weight.detach() * 1.1)
    optimizer.add_param_group({"params": [net.head.weight]})
"""
    },
    "thawing": {"batch": "net.inlet.requires_grad_(step % 2 == <0|1>)"},
    "zeroed": {"stepped": "<net|optimizer>.zero_grad(set_to_none=False)"},
    "gradient_set": {
        "grads": "net.head.weight.grad = <torch.ones(V, D)|net.head.weight.detach() * 0.1|net.head.weight.grad + 1|None>"
    },
    "gradient_scaled": {
        "grads": """
for p in net.parameters():
    if p.grad is not None:
        p.grad<.mul_(0.5)| = p.grad * 0.5|.data.div_(2)|.sub_(p.grad.mean())>
"""
    },
    "foreach": {"grads": "torch._foreach_<mul_|add_>([p.grad for p in net.parameters() if p.grad is not None], 0.9)"},
    "retained": {"backward": "loss.backward(retain_graph=True)\nloss.backward()"},
    "gradients_by_hand": {
        "backward": """
for p, g in zip(trained(net), torch.autograd.grad(loss, trained(net), allow_unused=True)):
    p.grad = g
"""
    },
    "input_gradient": {
        "batch": "if x.is_floating_point():\n    x.requires_grad_()",
        "grads": "keep('input', x.grad)",
    },
    "norms": {"stepped": "keep('norms', [p.norm().item() for p in net.parameters()])"},
    "init": {"setup": "nn.init.<xavier_uniform_|orthogonal_|normal_|kaiming_normal_>(net.head.weight)"},
    "input_noise": {"loss": "loss = loss + 0 * torch.rand_like(loss)"},
    "gradient_noise": {"grads": "net.head.weight.grad.add_(torch.randn_like(net.head.weight), alpha=0.01)"},
    "plain_noise": {"batch": "if x.is_floating_point():\n    x = x + 0.01 * torch.randn(x.shape)"},
    "view": {
        "setup": "view = net.head.weight<[1:3]|.t()|.detach()|.data>",
        "end": "keep('view', view)",
    },
    "before": {
        "setup": "before = [p.detach().clone() for p in net.parameters()]",
        "end": "keep('moved', [(p - b).norm() for p, b in zip(net.parameters(), before)])",
    },
    "flat": {
        "stepped": """
vector = nn.utils.parameters_to_vector(net.parameters())
keep("flat", vector.norm())
nn.utils.vector_to_parameters(vector * 0.99, net.parameters())
"""
    },
    "decay": {"loss": "loss = loss + 1e-3 * sum(p.<pow(2)|abs()>.sum() for p in net.parameters())"},
    "teacher": {
        "setup": "teacher = copy.deepcopy(net).eval().requires_grad_(False)",
        "loss": "loss = loss + F.mse_loss(read(net(x)), read(teacher(x)))",
    },
    "pruned": {
        "setup": "prune.l1_unstructured(net.head, 'weight', <0.3|5>)",
        "end": "prune.remove(net.head, 'weight')",
    },
    "doubled": {"setup": "net.double()\nnet.float()"},
    "home_again": {"stepped": "if step == 1:\n    net.<to('cpu')|cpu()>"},
    "applied": {"setup": "net.apply(lambda module: isinstance(module, nn.Linear) and module.weight.data.mul_(0.5))"},
    "eval_mode": {"setup": "net.<b0|head>.eval()"},
    "counted": {"stepped": "keep('count', sum(p.numel() * p.element_size() for p in net.parameters()))"},
    "detached_metric": {
        "loss": """
with torch.no_grad():
    again = read(net(x))
    keep("metric", [again.argmax(-1).eq(0).float().mean(), again.std()])
"""
    },
    "reseeded": {"batch": "torch.manual_seed(step)"},
    "many_losses": {"backward": "torch.autograd.backward([loss * 0.3, loss * 0.7])"},
    "vector_backward": {"backward": "torch.stack([loss, loss * 2]).backward(torch.tensor([1.0, 0.5]))"},
    "memory_format": {"setup": "net.to(memory_format=torch.channels_last)"},
    "unused": {"setup": "net.extra = nn.Linear(D, D)"},
    "frozen": {"<unplaced|setup>": "for p in list(net.parameters())[::2]:\n    p.requires_grad_(False)"},
    "lookahead": {
        "made": "slow = [p.detach().clone() for p in net.parameters()]",
        "stepped": """
if step == 2:
    with torch.no_grad():
        torch._foreach_lerp_(slow, list(net.parameters()), 0.5)
        for p, s in zip(net.parameters(), slow):
            p.copy_(s)
""",
    },
}

EXCLUDES = [
    {"scaler", "retained", "gradients_by_hand", "many_losses", "vector_backward"},
    {"scheduled", "plateau"},
    {"trips", "trips_backward", "trips_shape"},
    {"pruned", "swapped", "new_parameter", "gradient_set", "gradient_noise", "round_trip", "file", "init"},
]
"""At most one of each."""
