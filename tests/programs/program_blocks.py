"""Parts of random models, as text: the body of a module that maps (rows, length, D) to the same shape.

``<a|b>`` is one of the alternatives, drawn from the program's seed (``drawn_programs``).
"""

D = 8
"""Width of every value between two parts."""

DRAWS = {"dropout", "noise", "encoder_dropout", "sampled"}
"""Those that draw random numbers where their tensors lie."""

BLOCKS = {
    "linear": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D, bias=<True|False>)
def forward(self, x):
    return <torch.relu|F.gelu|torch.tanh|F.silu|F.softplus>(self.line(x))
""",
    "residual": """
def __init__(self):
    super().__init__()
    self.norm = nn.<LayerNorm(D)|RMSNorm(D)|LayerNorm(D, elementwise_affine=False)>
    self.up, self.down = nn.Linear(D, 16), nn.Linear(16, D)
def forward(self, x):
    return x + self.down(F.<relu|gelu|elu>(self.up(self.norm(x))))
""",
    "batch_norm": """
def __init__(self):
    super().__init__()
    self.line, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D, momentum=<None|0.1>, affine=<True|False>)
def forward(self, x):
    return self.norm(self.line(x).transpose(1, 2)).transpose(1, 2)
""",
    "conv": """
def __init__(self):
    super().__init__()
    self.conv = nn.Conv1d(D, D, 3, padding=1, groups=<1|2>)
    self.norm = nn.<GroupNorm(2, D)|InstanceNorm1d(D, affine=True, track_running_stats=True)>
def forward(self, x):
    return x + self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
""",
    "image": """
def __init__(self):
    super().__init__()
    self.one, self.two = nn.Conv2d(1, 3, 3, padding=1), nn.ConvTranspose2d(3, 1, 3, padding=1)
    self.norm = nn.BatchNorm2d(3)
def forward(self, x):
    y = x.unsqueeze(1)<.contiguous()|.contiguous(memory_format=torch.channels_last)|>
    return x + self.two(torch.relu(self.norm(self.one(y)))).squeeze(1)
""",
    "multihead": """
def __init__(self):
    super().__init__()
    self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
def forward(self, x):
    return x + self.attention(x, x, x, need_weights=<True|False>)[0]
""",
    "attention": """
def __init__(self):
    super().__init__()
    self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
    self.register_buffer("mask", torch.ones(16, 16).tril().bool(), persistent=<True|False>)
def forward(self, x):
    rows, length, _ = x.shape
    q, k, v = self.qkv(x).view(rows, length, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, <is_causal=True|attn_mask=self.mask[:length, :length]>)
    return x + self.out(y.transpose(1, 2).reshape(rows, length, D))
""",
    "attention_by_hand": """
def __init__(self):
    super().__init__()
    self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
    self.register_buffer("mask", torch.ones(16, 16).triu(1).bool())
def forward(self, x):
    score = self.q(x) @ self.k(x).<transpose(-2, -1)|mT> / D**0.5
    score = score.masked_fill(self.mask[: x.shape[1], : x.shape[1]], float("-inf"))
    return x + <score.softmax(-1) @ self.v(x)|torch.bmm(score.softmax(-1), self.v(x))>
""",
    "recurrent": """
def __init__(self):
    super().__init__()
    self.cell = nn.<LSTM|GRU|RNN>(D, D, batch_first=True, num_layers=<1|2>)
def forward(self, x):
    y, state = self.cell(x)
    return x + y
""",
    "both_ways": """
def __init__(self):
    super().__init__()
    self.cell = nn.<LSTM|GRU>(D, D // 2, batch_first=True, bidirectional=True)
def forward(self, x):
    lengths = torch.arange(x.shape[0], 0, -1).clamp(max=x.shape[1])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    y, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.shape[1])
    return x + y
""",
    "cell": """
def __init__(self):
    super().__init__()
    self.cell = nn.<GRUCell|RNNCell>(D, D)
def forward(self, x):
    state, states = torch.zeros(x.shape[0], D, dtype=x.dtype), []
    for now in x.unbind(1):
        state = self.cell(now, state)
        states.append(state)
    return torch.stack(states, 1)
""",
    "encoder": """
def __init__(self):
    super().__init__()
    self.layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True, norm_first=<True|False>)
def forward(self, x):
    return self.layer(x)
""",
    "encoder_dropout": """
def __init__(self):
    super().__init__()
    self.layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.2, batch_first=True)
def forward(self, x):
    return self.layer(x)
""",
    "dropout": """
def __init__(self):
    super().__init__()
    self.line, self.drop = nn.Linear(D, D), nn.<Dropout(0.3)|AlphaDropout(0.2)|Dropout1d(0.4)>
def forward(self, x):
    return x + self.drop(self.line(x))
""",
    "noise": """
def __init__(self):
    super().__init__()
    self.scale = nn.Parameter(torch.full((D,), 0.1))
def forward(self, x):
    return x + self.scale * torch.<randn_like|rand_like>(x)
""",
    "positions": """
def __init__(self):
    super().__init__()
    self.table = nn.Embedding(16, D)
    self.register_buffer("ids", torch.arange(16))
def forward(self, x):
    return x + self.table(<self.ids[: x.shape[1]]|torch.arange(x.shape[1])>)
""",
    "tied": """
def __init__(self):
    super().__init__()
    self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
    self.two.weight = self.one.weight
def forward(self, x):
    return self.two(torch.tanh(self.one(x)))
""",
    "own_function": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum((0, 1)) * <1|2>
def __init__(self):
    super().__init__()
    self.w = nn.Parameter(torch.linspace(0.5, 1.5, D))
def forward(self, x):
    return self.Scale.apply(x, self.w)
""",
    "straight_through": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
def forward(self, x):
    y = self.line(x)
    return y + (y.<round|sign>() - y).detach()
""",
    "counting": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
    self.register_buffer("mean", torch.zeros(D))
    self.register_buffer("calls", torch.tensor(0))
def forward(self, x):
    if self.training:
        self.calls += 1
        self.mean.<mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)|lerp_(x.detach().mean((0, 1)), 0.1)>
    return self.line(x - self.mean) / (1 + self.calls)
""",
    "replaced_buffer": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
    self.register_buffer("seen", torch.zeros(D))
def forward(self, x):
    self.seen = <0.5 * self.seen + x.detach().mean((0, 1))|torch.maximum(self.seen, x.detach().amax((0, 1)))>
    return self.line(x) + 0.1 * self.seen
""",
    "branch": """
def __init__(self):
    super().__init__()
    self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
def forward(self, x):
    if <x.mean().gt(0)|x.abs().max().item().__gt__(2.5)|bool(x[0, 0].gt(0).any())>:
        return torch.tanh(self.one(x))
    return self.two(x)
""",
    "until": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
def forward(self, x):
    rounds = 0
    while rounds < 3 and x.norm() > 0.5 + rounds:
        x = x * 0.7 + 0.1 * self.line(x)
        rounds += 1
    return x
""",
    "experts": """
def __init__(self):
    super().__init__()
    self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
def forward(self, x):
    flat = x.reshape(-1, D)
    weights, chosen = self.gate(flat).softmax(-1).topk(<1|2>, -1)
    y = torch.zeros_like(flat)
    for number, expert in enumerate(self.experts):
        rows, slots = torch.where(chosen == number)
        z = expert(flat[rows]) * weights[rows, slots, None]
        y<.index_add_(0, rows, z)|[rows] += z>
    return x + y.view_as(x)
""",
    "dataclass_inside": """
@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: dict
def __init__(self):
    super().__init__()
    self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
def both(self, x):
    return self.Pair(self.one(x), {"right": self.two(x)})
def forward(self, x):
    pair = self.both(x)
    return pair.left * torch.sigmoid(pair.right["right"])
""",
    "module_list": """
def __init__(self):
    super().__init__()
    self.lines = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
    self.scales = nn.ParameterList(torch.full((1,), 0.5 + n) for n in range(3))
def forward(self, x):
    for line, scale in zip(self.lines, self.scales):
        x = x + scale * torch.tanh(line(x))
    return x
""",
    "module_dict": """
def __init__(self):
    super().__init__()
    self.parts = nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Sequential(nn.Linear(D, D), nn.Tanh())})
    self.gains = nn.ParameterDict({"a": torch.ones(D), "b": torch.ones(())})
def forward(self, x):
    return sum(self.gains[name] * part(x) for name, part in self.parts.items())
""",
    "functional": """
def __init__(self):
    super().__init__()
    self.w, self.b = nn.Parameter(torch.randn(D, D) * 0.3), nn.Parameter(torch.zeros(D))
def forward(self, x):
    return F.layer_norm(F.linear(x, self.w<|.t()|[:, torch.arange(D)]>, self.b), (D,), <self.w[0]|None>)
""",
    "functional_norm": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
    self.register_buffer("mean", torch.zeros(D))
    self.register_buffer("var", torch.ones(D))
def forward(self, x):
    y = F.batch_norm(self.line(x).flatten(0, 1), self.mean, self.var, training=self.training, momentum=0.3)
    return y.view_as(x)
""",
    "weight_norm": """
def __init__(self):
    super().__init__()
    self.line = nn.utils<.parametrizations|>.<weight_norm|spectral_norm>(nn.Linear(D, D))
def forward(self, x):
    return torch.tanh(self.line(x))
""",
    "parametrized": """
class Symmetric(nn.Module):
    def forward(self, w):
        return (w + w.mT) / 2
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
    nn.utils.parametrize.register_parametrization(self.line, "weight", self.Symmetric())
def forward(self, x):
    with nn.utils.parametrize.cached():
        return self.line(torch.tanh(self.line(x)))
""",
    "checkpointed": """
def __init__(self):
    super().__init__()
    self.inner = nn.Sequential(nn.Linear(D, 16), nn.<ReLU()|BatchNorm1d(16)|Tanh()>, nn.Linear(16, D))
def forward(self, x):
    flat = x.reshape(-1, D)
    return x + torch.utils.checkpoint.checkpoint(self.inner, flat, use_reentrant=<True|False>).view_as(x)
""",
    "cache": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
    self.memory = None
def forward(self, x):
    now = x.detach().mean(0)[:1]
    self.memory = now if self.memory is None else torch.cat([self.memory, now])[<-6:|:>]
    return x + self.line(self.memory).mean(0)
""",
    "in_place": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
def forward(self, x):
    y = self.line(x)
    y = F.<relu|leaky_relu>(y, inplace=True)
    z = y * 2
    z[:, 0] += 1
    z[..., ::2] *= <0.5|x[..., ::2].detach()>
    z.masked_fill_(z > 3, 3.0)
    return z
""",
    "sorting": """
def __init__(self):
    super().__init__()
    self.score = nn.Linear(D, 1)
def forward(self, x):
    order = self.score(x).squeeze(-1).argsort(dim=1, <stable=True|descending=True>)
    return torch.<gather(x, 1, order[..., None].expand_as(x))|take_along_dim(x, order[..., None], 1)> * 0.5 + x * 0.5
""",
    "fourier": """
def __init__(self):
    super().__init__()
    self.w = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex64))
def forward(self, x):
    z = torch.fft.rfft(x) * <self.w|self.w.conj()|torch.view_as_complex(torch.view_as_real(self.w) * 0.5)>
    return torch.fft.irfft(z, n=D)
""",
    "hooked": """
def __init__(self):
    super().__init__()
    self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)
    self.one.register_forward_hook(lambda module, args, out: out * 0.5)
    self.two.register_forward_pre_hook(lambda module, args: (torch.tanh(args[0]),))
    self.two.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))
def forward(self, x):
    return self.two(self.one(x))
""",
    "codebook": """
def __init__(self):
    super().__init__()
    self.book = nn.Parameter(torch.randn(5, D), requires_grad=<True|False>)
def forward(self, x):
    near = torch.cdist(x.reshape(-1, D), self.book.detach()).argmin(-1)
    if self.training:
        with torch.no_grad():
            self.book.index_copy_(0, near[:1], x.reshape(-1, D)[:1] * 0.1 + self.book[near[:1]] * 0.9)
    q = self.book[near].view_as(x)
    return x + (q - x).detach()
""",
    "sampled": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
def forward(self, x):
    kept = torch.randperm(x.shape[1])[: max(1, x.shape[1] // 2)]
    mask = torch.bernoulli(torch.full_like(x[..., :1], 0.5))
    return x + self.line(x) * mask + x[:, kept].mean(1, keepdim=True)
""",
    "frozen": """
def __init__(self):
    super().__init__()
    self.fixed, self.line = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)
def forward(self, x):
    with torch.no_grad():
        side = self.fixed(x)
    return self.line(self.fixed(x) + side)
""",
    "expanded": """
def __init__(self):
    super().__init__()
    self.w, self.gate = nn.Parameter(torch.randn(D)), nn.Bilinear(D, D, D)
def forward(self, x):
    return self.gate(x, self.w.expand_as(x)<|.contiguous()>) + x.sum(<1|2|0>, keepdim=True).expand_as(x)
""",
    "pieces": """
def __init__(self):
    super().__init__()
    self.one, self.two = nn.Linear(D // 2, D // 2), nn.PReLU()
def forward(self, x):
    left, right = x.chunk(2, -1)
    left, right = self.one(right), self.two(left)
    return torch.cat(<[left, right]|[right, left]>, -1) + x.roll(1, 1).flip(-1)
""",
    "scattered": """
def __init__(self):
    super().__init__()
    self.table = nn.EmbeddingBag(7, D, mode=<"mean"|"sum"|"max">)
def forward(self, x):
    ids = x.detach()[..., 0].mul(3).long().remainder(7)
    y = x.clone()
    y.scatter_add_(1, ids.remainder(x.shape[1])[..., None].expand_as(x), x.cumsum(1) * 0.1)
    return y + self.table(ids)[:, None]
""",
    "other_dtype": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D).to(torch.<float64|bfloat16>)
def forward(self, x):
    return x + self.line(x.to(self.line.weight.dtype)).to(x.dtype)
""",
    "mapped": """
def __init__(self):
    super().__init__()
    self.w = nn.Parameter(torch.eye(D))
def forward(self, x):
    return torch.vmap(lambda row: torch.tanh(row @ self.w))(x)
""",
    "masked": """
def __init__(self):
    super().__init__()
    self.line = nn.Linear(D, D)
def forward(self, x):
    y = self.line(x)
    mask = torch.arange(x.shape[1])[None, :, None] < <2|y.detach().abs().sum().remainder(3)>
    y = torch.where(mask, y, <0.0|x|torch.zeros(())>)
    y[mask.expand_as(y)] = 0.25
    return y + (x * ~mask).nan_to_num()
""",
    "solved": """
def __init__(self):
    super().__init__()
    self.w = nn.Parameter(torch.randn(D, D) * 0.1)
def forward(self, x):
    a = self.w @ self.w.T + torch.eye(D)
    return <torch.linalg.solve(a, x.mT).mT|x @ torch.linalg.cholesky(a)|x @ torch.linalg.inv(a)>
""",
}
