"""Programs over single tensors here and at two workers, of all dtypes and layouts, drawn from a seed, as plain source:
``source(recipe(seed))``. What a statement raises is kept, and the program goes on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from drawn_programs import drawn

NAMES = [f"t{n}" for n in range(8)]
"""4 by 6, mostly."""

PLACES = ["", "worker1", "worker2"]

DTYPES = "float32|float32|float32|float64|bfloat16|float16|complex64|int64|int32|int8|uint8|bool"

MADE = [
    ("torch.randn(4, 6, generator=draw)", ""),
    ("torch.randn(4, 6, generator=draw).mul(3)", ""),
    ("torch.randn(6, 4, generator=draw)", ".t()"),
    ("torch.randn(8, 9, generator=draw)", "[1::2, 3:]"),
    ("torch.randn(6, generator=draw)", ".expand(4, 6)"),
    ("torch.randn(40, generator=draw)", ".as_strided((4, 6), (7, 1), 3)"),
    ("torch.randn(40, generator=draw)", ".as_strided((4, 6), (1, 5), 2)"),
    ("torch.arange(24.0)", ".view(4, 6)"),
    ("torch.randn(4, 6, 2, generator=draw)", "[..., 1]"),
    ("torch.complex(torch.randn(4, 6, generator=draw), torch.randn(4, 6, generator=draw))", ".<real|imag>"),
]
"""What is made, and what is seen of it."""

VIEW = (
    "<[1:]|[:, ::2]|[2]|[1, 2]|[..., None, :]|[:, -1:]|t()|mT|T|view(-1)|view(2, 12)|flatten()|reshape(6, 4)"
    "|unflatten(1, (2, 3))|as_strided((2, 3), (1, 2))|as_strided((3, 3), (1, 1), 1)|unfold(1, 3, 2)|unfold(0, 2, 1)"
    "|diagonal()|diagonal(1)|select(1, 2)|narrow(1, 1, 3)|split(2)[1]|split([1, 5], 1)[1]|chunk(2, 1)[0]|unbind(1)[3]"
    "|tensor_split(3, 1)[1]|hsplit(2)[1]|movedim(0, 1)|swapaxes(0, 1)|expand(3, 4, 6)|data|detach()|real|view(torch.int32)"
    "|view(torch.int8)|view_as({t})|unsqueeze(0)|squeeze()|permute(1, 0)|ravel()|adjoint()|conj()|resolve_conj()"
    "|contiguous()|[:0]|[:, :0]>"
)

WRITE = (
    "<add_(1)|mul_(2)|mul_(0.5)|zero_()|fill_(2)|neg_()|clamp_(0, 1)|sub_({t})|copy_({t})|add_({t}, alpha=2)|abs_()|square_()"
    "|t_()|sqrt_()|bitwise_not_()|logical_not_()|eq_(0)|fill_diagonal_(3)|masked_fill_({t}.real.gt(0), 1)|cumsum_(0)|tril_()"
    "|addcmul_({t}, {t}, value=0.5)|lerp_({t}, 0.3)|floor_divide_(2)|remainder_(2)|clamp_(min=0)|pow_(2)|transpose_(0, 1)"
    "|unsqueeze_(0)|requires_grad_()|detach_()|__setitem__(0, 1)|__setitem__((slice(None), 0), {t}[:, 1])|swapdims_(0, 1)>"
)

PLAIN = [
    "{T} = {t} <+|-|*|/|//|%|**> <{t}|{t}|2|0.5|{t}[0]|{t}[:, :1]|{t}.sum()|True>",
    "{T} = <2|0.5|True> <+|-|*|/|**> {t}",
    "{T} = torch.<bitwise_or|bitwise_and|bitwise_xor|bitwise_left_shift|bitwise_right_shift|eq|ne|gt|le>({t}, <{t}|1|{t}[0]>)",
    "{T} = ~{t}",
    "{T} = {t}.to(torch.<DTYPES>)",
    "{T} = {t}.to(torch.<float32|float64>)",
    "{T} = {t}.to({t})",
    "{T} = {t}.type_as({t})",
    "{T} = {t}.<float|half|bfloat16|double|long|int|byte|bool|cfloat|char|short>()",
    "{T} = torch.where({t}.real > 0, <{t}|0.5|1|{t}.sum()>, <{t}|-1|{t}[0]|0.0>)",
    "{T} = torch.where({m}, {t}, {t})",
    "{T} = torch.<sin|exp|sigmoid|relu|sign|round|trunc|isnan|isfinite|square|erf|log1p|neg|abs|angle|reciprocal>({t})",
    "{T} = torch.<cumsum|cumprod|softmax|log_softmax|flip|roll|sort|argsort|diff|logcumsumexp>({t}, <0|1|-1>)",
    "{T} = F.<gelu|silu|softplus|hardtanh|elu|celu|glu|normalize|logsigmoid|mish|relu6|hardswish>({t})",
    "{T} = torch.<maximum|minimum|fmod|atan2|hypot|copysign|fmax|xlogy|logaddexp|heaviside|nextafter|ldexp>({t}, {t})",
    "{T} = {t}.clamp(<{t}|0|{t}.min()|None>, <{t}.max()|1|None>)",
    "{T} = torch.lerp({t}, {t}, <0.3|{t}|{t}.sum()>)",
    "{T} = torch.addcmul({t}, {t}, {t}, value=<2|0.5>)",
    "{T} = ({t} @ {t}.mT) @ {t}",
    "{T} = torch.addmm({t}, {t} @ {t}.mT, {t}, alpha=<2|0.5>, beta=<0|1>)",
    '{T} = torch.einsum("ij,kj,kl->il", {t}, {t}, {t})',
    "{T} = torch.cat([{t}<[:2]|[:0]>, {t}<[2:]|>, torch.zeros(<0, 6|2, 6|0>)])",
    "{T} = torch.stack([{t}, {t}], <0|-1>).<sum|mean|amax|prod>(<0|-1>)",
    "{T} = torch.block_diag({t}[:2, :3], {t}[:2, 3:])",
    "{T} = {t}.<sum|mean|var|std|norm|prod|amax|argmax|median|logsumexp|nansum|count_nonzero|any|all|max|min|mode>(<0|1|-1>)",
    "{T} = {t} + torch.full((), <0.5|2|True>, dtype=torch.<DTYPES>)",
    "{T} = {t} + at(torch.full((), <0.5|2>, dtype=torch.<DTYPES>), {p})",
    "{T} = {t} + torch.tensor(<2.0|1>)",
    "{T} = at({t}, {p})",
    "{T} = home({t})",
    "{T} = {t}.<clone()|contiguous()|detach()|detach().clone().requires_grad_()|t()|data|mT.contiguous().mT>",
    "{T} = {t}.clone(memory_format=torch.<contiguous_format|preserve_format>)",
    "{T} = torch.<empty_like|zeros_like|ones_like>({t}, dtype=<None|torch.float64|torch.int8>).fill_(<2|1>)",
    "{T} = {t}.new_<zeros|ones>((4, 6)) + <{t}|1>",
    "{T} = {t}.new_full((4, 6), <2|{t}.sum().item()>)",
    "{T} = {t}.new_tensor([[1.0, 2.5]])",
    "{T} = torch.nan_to_num({t} / 0)",
    "{T} = {t}.repeat(1, 2)[:, <::2|:6|3:9>]",
    "{T} = {t}.repeat_interleave(2, 0)[::2]",
    "{T} = torch.tile({t}, (2,)).unflatten(1, (2, 6))[:, 1]",
    '{T} = F.pad({t}, (1, -1), <value=0.5|mode="circular">)',
    "{T} = torch.<complex|polar>({t}.real.float(), {t}.real.float())<|.conj()|.imag|.abs()>",
    "{T} = torch.fft.<fft|ifft|rfft|fft2|fftshift>({t})<|.real|.imag|.abs()>",
    "{T} = torch.view_as_real({t}.cfloat())[..., <0|1>]",
    "{T} = {t}.to(torch.float8_<e4m3fn|e5m2>)<.float()|.to(torch.bfloat16)|>",
    "{T} = F.conv2d({t}.float()[None, None]<|"
    ".contiguous(memory_format=torch.channels_last)>, torch.ones(1, 1, 3, 3), padding=1)[0, 0]",
    '{T} = F.interpolate({t}.float()[None, None], scale_factor=2, mode=<"nearest"|"bilinear">)[0, 0, ::2, ::2]',
    "{T} = F.<max_pool1d|avg_pool1d>({t}.float()[None], 3, 1, 1)[0]",
    "{T} = F.layer_norm({t}.float(), (6,), {t}.float()[0])",
    "{T} = torch.bucketize({t}.real.float(), torch.tensor([-1.0, 0.0, 1.0])) * 1.0",
    "{T} = torch.searchsorted({t}.real.float().sort(1)[0], {t}.real.float().contiguous()) * 1.0",
]

ALIASES = [
    "w = {t}.VIEW\nw.WRITE\nkeep('view', look(w))",
    "w = {t}.VIEW\nw.WRITE\nkeep('view', look(w))",
    "with torch.no_grad():\n    w = {t}.VIEW\n    w.WRITE\n    keep('view', look(w))",
    "with torch.no_grad():\n    w = {t}.VIEW.VIEW\n    w.WRITE\n    keep('view', look(w))",
    "{T} = {t}.clone()\nw = {T}.VIEW\n{T}.WRITE\nkeep('view', look(w, w + 1))",
    "{T} = {t}.VIEW",
    "{T}.WRITE",
    "{T}.WRITE",
    "{T} <+=|-=|*=|/=|//=|%=> <{t}|2|0.5|{t}[0]|{t}.sum()>",
    "kept.append({t}.VIEW)",
    "kept[-1].WRITE",
    "keep('kept', look(*kept))",
    "{T} = kept.pop()",
    "a, b = {t}.clone().<split(2)|chunk(2, 0)|tensor_split(2)|unbind()[:2]|split([3, 1])>\na.mul_(2)\n"
    "b<.add_(a[:1])|[0] = 3>\nkeep('parts', look(a, b))",
    "a = {t}.clone()\nb, c = a.unbind(1)[:2]\nb.copy_(c)\nkeep('parts', look(a, b, c))",
    "{T}.data = <{t}.clone()|{T}[:2]|{T} * 2|{t} + 1>",
    "{T}.grad = <{t}.detach().clone()|{t}.detach()|None>",
    "w = {t}.to(torch.cfloat).clone()\nw.<real|imag>.<mul_(2)|copy_({t}.real)|zero_()>\n"
    "w.conj().<imag|real>.add_(1)\n{T} = w.<real|imag|conj()|abs()|mH>",
    "w = {t}.clone().view(torch.<int32|uint8|int16>)\nw.<bitwise_and_(3)|add_(1)|zero_()>\nkeep('words', look(w))",
    "w = {t}.detach().clone()\nw.swapaxes_(0, 1)\nw.add_(1)\n{T} = w<.t()|>",
    "w = {t}.float().new_zeros(2, 6).<expand(2, 6)|expand(3, 2, 6)|as_strided((4, 6), (0, 1))>\n"
    "w.<add_(1)|mul_({t}[0])|fill_(3)|copy_({t})>\nkeep('w', look(w))",
    "{T} = torch.as_strided({t}, (4, 6), (<6|1|0>, <1|4|0>)<|, 1>)",
    "{T} = torch.<slice_scatter({t}, {t}[:2], 0, 1, 3)|select_scatter({t}, {t}[1], 0, 2)|diagonal_scatter({t}, {t}[0, :4])>",
    "w = {t}[None].expand(2, -1, -1)\nkeep('w', look(w.clone(), w.contiguous(), w.reshape(8, 6)))",
    "keep('overlap', look(<torch._debug_has_internal_overlap({t})|{t}.is_contiguous()|{t}.is_set_to({t})|"
    "{t}.storage_offset()>))",
    "keep('set', [{t}.is_set_to({t}), {t}.stride(), {t}._is_view(), {t}._base is None, {t}.is_nonzero()"
    " if {t}.numel() == 1 else 0])",
    "{T} = {t}.clone()\n{U} = {T}\n{U}.WRITE",
    "{T} = {t}.index_put_((torch.tensor([0, 0]),), {t}[0], accumulate=True)",
]

OUT = [
    "x = torch.ones(<3|0|1, 3>)\nkeep('sum', look(at(x, {p}).sum() + (x + {t}.real.float()[0, :3]).sum()))\n"
    "torch.add(torch.ones(5, 6), {t}.real.float()[0], out=x)\nkeep('x', look(x))",
    "torch.<add|sub|mul|div|maximum|atan2|true_divide|pow>({t}, {t}, out={T})",
    "torch.<sin|exp|neg|abs|round|sigmoid|square>({t}, out={T})",
    "torch.<add|mul>({t}, {t}, out={T}<.t()|[:2]|[:, 1:]>)",
    "torch.<add|mul>({t}<[:, :3]|[:2]>, <2|{t}[:, :3]|{t}[:2]>, out={T}<[:, :3]|[:2]|[:, ::2]>)",
    "torch.<sum|mean|amax>({t}, 1, out={T}[:, <0|2>])",
    "torch.cat([{t}[:1], {t}[1:]], out={T})",
    "torch.stack([{t}[0], {t}[1], {t}[2], {t}[3]], out={T})",
    "torch.matmul({t}[:, :4], {t}, out={T})",
    "torch.<max|min|sort|topk|kthvalue>({t}, <1|2>, out=({T}[:, 0], at(torch.zeros(4, dtype=torch.long), {p})))",
    "torch.where({m}, {t}, {t}, out={T})",
    "torch.<cumsum|cumprod>({t}, 1, out={T})",
    "torch.gather({t}, 1, {i}, out={T})",
    "torch.index_select({t}, 0, {i}[0, :4], out={T})",
    "torch.masked_select({t}, {m}, out=at(torch.zeros(0), {p}))",
    "torch.arange(24.0, out={T}.view(-1))",
    "torch.clamp({t}, 0, 1, out={T})",
    "{T} = torch.add({t}, {t}, out=torch.empty(<0|4, 6>))",
    "{T} = torch.add({t}, {t}, out=at(torch.empty(4, 6), {p}))",
    "torch.eq({t}, {t}, out={T})",
    "torch.linalg.<norm({t}, dim=1, out={T}[:, 0])|multi_dot([{t}[:, :4], {t}[:, :4], {t}], out={T})>",
    "torch.randn(4, 6, generator=draw, out={T})",
]

INDEXED = [
    "{T} = {t}[{i}[:, 0]<|.to(torch.int32)|.to(torch.uint8)>]",
    "{T} = {t}[<{i}[0]|[0, 1, 1, 3]|range(4)|{i}[0] % 2>]",
    "{T} = {t}[:, <{i}[0]|[5, 0, 1, 2, 3, 4]|{i}[0].tolist()>]",
    "{T} = {t}[{i}[:, 0, None], {i}[:1] % 6]",
    "{T} = {t}[{i}[0, 0]:<{i}[0, 1] + 3|4>]",
    "{T} = {t}[{m}]",
    "{T} = {t}[{m}[:, 0]]",
    "{T} = {t}[{m}<|[:, 0]>].sum() + {t}",
    "{T} = {t}[{m}[:, 0], {i}[:1, 0]]",
    "{T} = {t}[torch.tensor(<True|False>)].sum() + {t}",
    "{T} = {t}[None, ..., <{i}[0, 0]|{i}[0, 0].item()>]",
    "{T}[{m}] = <0.5|{t}[{m}]|{t}.sum()|1>",
    "{T}[{m}[:, 0]] = <0.5|{t}[{m}[:, 0]]|{t}[0]>",
    "{T}[{i}[:, 0]] = <1|{t}|{t}[0]|{t}[{i}[:, 0]]>",
    "{T}[:, {i}[0, :2]] = <1|{t}[:, :2]|{t}.sum()>",
    "{T}[{i}[0, 0]] = <{t}[1]|{t}.max()|2>",
    "{T}[<...|1:3|:, 2|0, 0|::2, ::3|None|[0, 2]|(slice(None), [1, 2])>] = <1|{t}.sum()|True|2.5>",
    "{T}[1:3] = {t}[<0:2|2:4|1:3>]",
    "{T} = {t}.index_<select(0, {i}[:, 0])|add(0, {i}[:, 0], {t})|fill(1, {i}[0], 0.5)|"
    "copy(0, {i}[:, 0] * 0 + torch.arange(4), {t})>",
    "{T} = {t}.index_put(({i}[:, 0], {i}[0, :4]), {t}[0, :4], accumulate=<True|False>)",
    "{T}.index_<add_(0, {i}[:, 0], {t}, alpha=2)|fill_(1, {i}[0, :2], 2)|put_(({i}[:, 0],), {t}, accumulate=True)|"
    'reduce_(0, {i}[:, 0], {t}, "prod")>',
    "{T} = {t}.gather(<0|1>, {i})",
    "{T} = {t}.scatter(<0|1>, {i}, <{t}|1>)",
    '{T}.scatter_<add_(1, {i}, {t})|(0, {i}, 2.0)|reduce_(0, {i}, {t}, "amax")|'
    'reduce_(1, {i}, {t}, "mean", include_self=False)>',
    "{T} = {t}.<take({i})|take_along_dim({i}, 1)|put({i}[0], {t}[0])>",
    "{T} = {t}.masked_fill({m}, <1|{t}.sum()|{t}[0, 0]>)",
    "{T} = {t}.masked_scatter({m}, {t})",
    "{T}.masked_<fill_({m}, <0.5|{t}.sum()>)|scatter_({m}, {t})>",
    "{T} = torch.masked_select({t}, {m}).sum() + {t}",
    "keep('found', look(*torch.<nonzero({t}, as_tuple=True)|where({m})|unique({t}, return_counts=True)|"
    "unique_consecutive({m}, return_inverse=True)>))",
    "keep('found', look({t}.<nonzero()|argwhere()|unique()|unique(dim=0)|nonzero().shape[0]>))",
    "keep('found', look(*{t}.<sort(1, stable=True)|topk(2)|kthvalue(2)|max(0)|cummax(1)|mode(0)|median(1)|"
    "aminmax()|min(1, True)>))",
    "keep('found', look(torch.<bincount({i}.flatten())|histc({t}, 4)|cdist({t}, {t})|corrcoef({t})|"
    "tril_indices(3, 3)|combinations({t}[0])>))",
    "{T} = F.one_hot({i}[:, 0], 6) * {t}",
    "{T} = F.embedding({i}[:, 0], {t})",
    '{T} = F.embedding_bag({i}, {t}, mode=<"mean"|"sum"|"max">)',
    "{T} = torch.cartesian_prod({t}[0, :2], {t}[1, :3])",
    "{i} = <{t}.argsort(1).remainder(4)|{t}.real.long().abs() % 4|{i}.flip(0)|at({i}, {p})|home({i})|"
    "torch.randint(0, 4, (4, 6))|{t}.argmax(1)[:, None].expand(4, 6) % 4>",
    "{m} = <{t}.real.gt(0)|{m}.logical_not()|{m} & {t}.ne(0)|{t}.isnan()|at({m}, {p})|home({m})|"
    "{m}.logical_or({m}.flip(0))|{m}.t().contiguous().t()|{t}.bool()>",
    "{T} = {t}.repeat_interleave({i}[:, 0], 0)",
    "{T} = {t}.split(<{i}[0, 0].item() + 1|[1, 3]|2>)[0]",
]

ASKED = [
    "if {t}.real.sum() > 0:\n    {T} = {T} * 2\nelse:\n    {T} = {T} - 1",
    "{T} = {t} * {t}.real.max().item()",
    "keep('asked', [int({i}[0, 0]), bool({m}.any()), float({t}.real[0, 0]), len({t}), {t}.tolist(), {t}[0, 0].item()])",
    'keep(\'asked\', [f"{{t}.real.float().sum():.3f}", list(range({i}[0, 0])), "abcdef"[{i}[1, 1]],'
    " {t}.shape, round({t}.real.float()[0, 0].item(), 3)])",
    "keep('asked', [{t}.equal({t}), {t}.allclose({t}), torch.equal({t}, {t}.clone()),"
    " torch.is_nonzero({t}[0, 0]), {t}.isclose({t}).all().item()])",
    "keep('asked', [{t}.dtype, {t}.is_complex(), torch.result_type({t}, {t}), torch.result_type({t},"
    " 2.0), {t}.element_size(), {t}.dim()])",
    "keep('asked', [x.item() for x in {t}[0]] + [tuple(x.shape) for x in {t}])",
    "keep('asked', [{t}.real.sum() in [1, 2], 3 in {i}, {t}[0].real.sum().__bool__(),"
    " max({t}.real[0].float()).item(), sum({i}[0]).item()])",
    "keep('asked', look(torch.<arange({i}[0, 0])|full((2, 2), {t}[0, 0].item())|linspace({t}[0, 0], 2, 3)|"
    "arange({i}[0, 0].item(), 5)|tensor({t}[0, 0])|tensor([{i}[0, 0], 2])|as_tensor({t})|eye({i}[0, 0])>))",
    "keep('asked', look(torch.<zeros|ones>({i}[0, 0], {i}[0, 1] + 1)))",
    "keep('asked', look({t}.new_zeros({i}[0, 0]), {t}.view(torch.Size([6, 4])), {t}.reshape({i}.shape)))",
    "keep('asked', look(torch.tensor({t}.tolist()), torch.from_numpy({t}.detach().cpu().numpy().copy())))",
    "for row in {t}.<unbind()|split(1)|__iter__()>:\n    {T} = {T} + row",
    "while 20 < {T}.real.abs().sum() < 1e30:\n    {T} = {T} * 0.25",
    "{T} = {t} ** <{i}[0, 0].item()|{t}.real.mean().item()|{i}[0, 0]>",
    "{T} = torch.add({t}, {t}, alpha={i}[0, 0].item())",
    "{T} = {t}.roll({i}[0, 0].item(), 0)",
    "keep('empty', look({t}[:0].<sum()|mean()|prod()|max()|any()|all()|norm()|cumsum(0)|sort()[0]|sum(0)|mean(0)|"
    "t()|amax(0)|argmax()|std()>))",
    "keep('empty', look({t}[:, :0] @ {t}[:0].<mT|t()>.mT if False else {t}[:, :0] @ torch.zeros(0, <0|3>)))",
    "keep('empty', look(torch.cat([{t}[:0], {t}[:0]]), F.linear({t}.float()[:0], torch.ones(2, 6)),"
    " {t}[:0].split(1), torch.zeros(0, 6).to({t})))",
    "keep('scalar', look({t}[0, 0].<expand(3)|view(1)|t()|unsqueeze(0)|repeat(2)|flatten()|sum()|sort()[0]|"
    "max(0)[0]|clone()|argmax()|nonzero()|unbind()|reshape(1, 1)>))",
    "keep('scalar', look(torch.<dot|outer|kron|vdot|"
    "inner>({t}[0], {t}[1]), torch.stack([{t}[0, 0], {t}[1, 1]]), {t}[0, 0] @ {t}[0, 0]))",
    "keep('raises', {t}[torch.tensor([<9|0|-7>])].sum().item())",
    "keep('raises', {t}.<gather(1, {i} + 4)|index_select(0, {i}[0] + 3)|take({i} + 22)|scatter(1, {i} + 4, 1)>.sum().item())",
    "keep('raises', F.<embedding({i}[0] + 3, {t})|nll_loss({t}, {i}[:, 0] + 4)|one_hot({i} + 2, 4)|"
    "cross_entropy({t}, {i}[:, 0] + 3)>.sum().item())",
    "keep('raises', look(torch.linalg.<cholesky({t}[:4, :4])|inv({t}[:4, :4] * 0)|solve({t}[:, :4] * 0, {t})|"
    "inv({t}[:, :4])>))",
    "keep('raises', look({t}.<view(5, 5)|reshape(-1, 7)|expand(5, 6)|squeeze(9)|item()|sum(7)|unflatten(0, (3, 3))|"
    "as_strided((9, 9), (9, 9))|view(torch.complex128)|unfold(0, 9, 1)|t_()[9]>))",
]

CHANCE = [
    "{T} = {t} + torch.<rand|randn>(4, 6<|, dtype=torch.float64|, generator=draw>)",
    "{T} = torch.<rand_like|randn_like>({t}<|, dtype=torch.float32>)",
    "{T} = torch.randint_like({t}, 5)",
    "{T} = F.<dropout|alpha_dropout|feature_alpha_dropout|dropout1d>({t}, <0.5|0.2>)",
    "{T}.<uniform_|normal_|exponential_|cauchy_|log_normal_|geometric_(0.5)|bernoulli_(0.3)|random_|random_(0, 9)|"
    "bernoulli_({t}.real.sigmoid())>()",
    "{T}.<uniform_(0, 2, generator=draw)|normal_(generator=draw)|random_(5, generator=draw)>",
    "{T}<[:2]|.t()|[:, ::2]>.<normal_()|uniform_(-1, 1)|random_(3)|exponential_()>",
    "{T} = torch.bernoulli({t}.real.float().sigmoid()<|, generator=draw>)",
    "{T} = torch.multinomial({t}.real.float().abs() + 0.1, <2|6>, <True|False><|, generator=draw>) * 1.0",
    "{T} = {t}[torch.randperm(4<|, generator=draw>)]",
    "{T} = torch.normal({t}.real.float(), {t}.real.float().abs())",
    "{T} = torch.normal(<0.0|{t}.real.float()>, <1.0, (4, 6)|{t}.real.float().abs()>)",
    "{T} = torch.poisson({t}.real.float().abs())",
    "{T} = F.rrelu({t}.float(), training=True)",
    "{T} = F.gumbel_softmax({t}.float(), hard=<True|False>)",
    "{T} = torch.distributions.<Normal(0, 1).sample((4, 6))|Categorical(logits={t}.real.float()).sample((6,)).t()|"
    "Gamma({t}.real.float().abs() + 1, 1.0).rsample()|Beta({t}.real.float().abs() + 1, 2.0).rsample()> + {t}",
    "torch.manual_seed(<3|5>)",
    "torch.default_generator.manual_seed(<3|5>)",
    "state = torch.get_rng_state()\n{T} = torch.randn_like({t})\ntorch.set_rng_state(state)\n{U} = torch.randn_like({t})",
    "state = draw.get_state()\n{T}.normal_(generator=draw)\ndraw.set_state(state)\n{U}.normal_(generator=draw)",
    "with torch.random.fork_rng(devices=[]):\n    torch.manual_seed(4)\n    {T} = F.dropout({t}, 0.5)",
    "keep('draws', [torch.rand(1), draw.get_state().sum(), torch.initial_seed()])",
    "torch.nn.init.<xavier_uniform_|orthogonal_|trunc_normal_|kaiming_normal_|sparse_>({T}<|, 0.5>)",
    "{T} = F.scaled_dot_product_attention({t}.float()[None], {t}.float()[None], {t}.float()[None], dropout_p=<0.0|0.3>)[0]",
]

GRADIENTS = [
    "{T} = {t}.detach().float().clone().requires_grad_()",
    "{T} = {t}.detach().clone().requires_grad_()\n{U} = {T} * {t}",
    "({t} * {t}).real.sum().backward()",
    "({t} * {t}).real.sum().backward(retain_graph=<True|False>)",
    "{t}.backward(<{t}.detach()|torch.ones(4, 6)|None>)",
    "keep('gradients', look(*torch.autograd.grad(({t} * {t}).real.sum(), [{t}, {t}], allow_unused=True,"
    " materialize_grads=<True|False>)))",
    "a = {t}.detach().float().clone().requires_grad_()\n"
    "[g] = torch.autograd.grad((a.sin() * {t}.detach()).real.sum(), a, create_graph=True)\n"
    "(g * a).sum().backward()\nkeep('second', look(a, g))",
    "{T}.register_hook(lambda g: <g * 2|g.cpu() * 0.5|None|torch.ones_like(g)|torch.zeros(4, 6)|at(g.detach(), {p})>)",
    "{T}.register_post_accumulate_grad_hook(lambda p: <p.grad.mul_(0.5)|p.data.sub_(p.grad)|setattr(p, 'grad', None)>)",
    "{T}.register_hook(lambda g: 1 / 0)",
    "{T}.retain_grad()",
    "{T}.requires_grad_(<True|False>)",
    "{T} = {T}.detach_()",
    "{T}.grad = <{t}.detach()|None|{t}.detach().clone()>",
    "keep('grad', look({t}.grad, {t}.is_leaf, {t}.output_nr))",
    "a = {t}.detach().float().clone().requires_grad_()\nfor _ in range(2):\n"
    "    (a * {t}.detach()).real.sum().backward()\n    held = a.grad\n{T} = held",
    "a = {t}.detach().float().clone().requires_grad_()\nb = a * 1\n"
    "b<[0]|[:, 1]|.t()[2]>.<mul_(2)|copy_({t}.detach()[0, 0].real.float())|zero_()|add_(a[0, 0])>\n"
    "b.<sum()|pow(2).sum()>.backward()\nkeep('a', look(a, b))",
    "a = {t}.detach().float().clone().requires_grad_()\nb = a * 1\nv = b.view(-1)[3:9]\nb.mul_(a)\nv.mul_(2)\n"
    "(b * b).sum().backward()\nkeep('a', look(a, b, v))",
    "a = {t}.detach().float().clone().requires_grad_()\nb = a.exp()\nb.add_(1)\nb.sum().backward()",
    "a = {t}.detach().float().clone().requires_grad_()\nwith torch.no_grad():\n    v = a<[1:]|.view(-1)|.t()>\n"
    "    v.mul_(2)\n(a * a).sum().backward()\nkeep('a', look(a, v))",
    "a, w = {t}.detach().float().clone().requires_grad_(), {t}.detach().float().clone().requires_grad_()\n"
    "out, sign = Scaled.apply(a, w, <0.5|2.0>)\n(out * sign).sum().backward()\n"
    "keep('scaled', look(a, w, out, sign))",
    "a = {t}.detach().float().clone().requires_grad_()\nb = a * 2\nc = Halved.apply(b)\n(c * b).sum().backward()\n"
    "keep('halved', look(a, b, c))",
    "a = {t}.detach().float().clone().requires_grad_()\nb, c = Viewed.apply(a)\n"
    "<b.sum()|c.sum()|(b.sum() + c.sum())>.backward()\nkeep('viewed', look(a, b, c))",
    "keep('mapped', look(torch.func.<vmap(Mapped.apply)({t}.detach().float())|"
    "grad(lambda x: Mapped.apply(x).sum())({t}.detach().float())|"
    "jvp(Mapped.apply, ({t}.detach().float(),), ({t}.detach().float(),))[1]|"
    "vmap(torch.func.grad(lambda x: Mapped.apply(x).sum()))({t}.detach().float())>))",
    "a = {t}.detach().float().clone().requires_grad_()\n"
    "b = torch.utils.checkpoint.checkpoint(lambda x: (x.sin() * {t}.detach()).real + F.dropout(x, 0.5),"
    " a, use_reentrant=<True|False>)\nb.sum().backward()\nkeep('again', look(a, b))",
    "with torch.autograd.graph.saved_tensors_hooks(lambda x: <x.cpu()|x.clone()|(x, 1)[0]|"
    "at(x.detach(), {p})>, lambda x: x):\n    a = {t}.detach().float().clone().requires_grad_()\n"
    "    ({t}.detach() * a.sin() * a).real.sum().backward()\n    keep('saved', look(a))",
    "with torch.<no_grad|inference_mode|enable_grad>():\n    {T} = {t} * {t}\n"
    "    with torch.<enable_grad|no_grad|inference_mode>():\n        {U} = {t} + {t}",
    "with torch.autograd.<detect_anomaly()|forward_ad.dual_level()|graph.save_on_cpu()|"
    "set_multithreading_enabled(False)|graph.allow_mutation_on_saved_tensors()>:\n"
    "    a = {t}.detach().float().clone().requires_grad_()\n    b = a.sin()\n"
    "    (b * {t}.detach()).real.sum().backward()\n    keep('a', look(a))",
    "f = lambda x: (x.sin() @ {t}.detach().float().mT).sum(1)\n"
    "keep('func', look(torch.func.<jacrev(f)|jacfwd(f)|vmap(f, in_dims=0)|"
    "vmap(torch.func.jacrev(lambda r: r.sin() * r))|hessian(lambda x: f(x).sum())|"
    "vmap(lambda r: r * {t}.detach().float(), chunk_size=2)|"
    "vmap(torch.func.grad(lambda r: r.pow(2).sum()), in_dims=1, out_dims=1)>({t}.detach().float())))",
    "keep('vmap', look(torch.func.vmap(lambda r: F.dropout(r, 0.5), randomness=<'same'|'different'|"
    "'error'>)({t}.detach().float())))",
    "keep('jvp', look(*torch.func.<jvp|"
    "linearize>(lambda x: (x.exp() * {t}.detach().float()).sum(), <({t}.detach().float(),),"
    " ({t}.detach().float(),)|{t}.detach().float()>)[:1]))",
    "keep('functionalize', look(torch.func.functionalize(lambda x: x.clone().view(-1).mul_(2).view(4, 6).t())({t}.detach())))",
    "keep('check', torch.autograd.gradcheck(lambda x: (x.sin() * {t}.detach().double()).real,"
    " {t}.detach().double().clone().requires_grad_()))",
    "g = torch.autograd.functional.<jacobian|"
    "hessian>(lambda x: (x * x * {t}.detach().float()).sum(), {t}.detach().float())\nkeep('g', look(g))",
    "{T} = (lambda f: (f.requires_grad_(), (f * f).sum().backward(), f.grad)[2])({t}.detach().float().clone())",
    "a = {t}.detach().float().clone().requires_grad_()\nb = (a * 2).<retain_grad() or a|clone()>\n"
    "b.sum().backward(inputs=[a])\nkeep('inputs', look(a))",
    "a = {t}.detach().float().clone().requires_grad_()\nb = a * 2\nw = b<[:, :4]|[:4, 2:]|.T[1:5]|.view(2, 2, 6)[0, :, :2]|>\n"
    "<w|b>.<t_()|transpose_(0, 1)|swapaxes_(-1, 0)|unsqueeze_(0).squeeze_()|unsqueeze_(1).transpose_(0, 2)|"
    "__setattr__('data', b.data.mT.contiguous())>\n"
    "<b.mul_(3)|w.mul_(w.detach() + 1)|w[0].zero_()|b[0] = 1|w + 1>\n"
    "((w.sin() * torch.arange(1.0 * w.numel()).view(w.shape)).sum() + b[1].exp().sum()).backward()\nkeep('turned', look(a, w))",
    "node = ({t} * {t}).grad_fn\n"
    "keep('node', [node is None, [type(n).__name__ for n, _ in node.next_functions] if node else None])",
    "a = {t}.detach().float().clone().requires_grad_()\nb = a.exp()\n"
    "handle = b.grad_fn.register_prehook(lambda gs: (gs[0] * 2,))\n"
    "b.grad_fn.register_hook(lambda gi, go: (gi[0] + 1,))\nb.sum().backward()\nkeep('hooks', look(a))",
]

LISTS = [
    "found = torch._foreach_<add|mul|sub|div|maximum>([{t}, {t}, {t}], <2|0.5|[{t}, {t}, {t}]|[1, 2, 3]>)\n"
    "keep('each', look(*found))",
    "torch._foreach_<add_|mul_|sub_|div_>([{T}, {U}], <2|0.5|[{t}, {t}]|[1, 2]>)",
    "torch._foreach_<sqrt_|exp_|neg_|abs_|zero_|reciprocal_|sigmoid_>([{T}, {U}])",
    "torch._foreach_<addcmul_|addcdiv_>([{T}, {U}], [{t}, {t}], [{t}, {t}], <0.5|[1.0, 2.0]>)",
    "torch._foreach_<lerp_([{T}, {U}], [{t}, {t}], 0.3)|copy_([{T}, {U}], [{t}, {t}])|add_([{T}, {U}], [{t}, {t}], alpha=2)>",
    "keep('norms', look(*torch._foreach_<norm|max>([{t}, {t}])))",
    "found = torch.<broadcast_tensors({t}, {t}[0])|meshgrid({t}[0], {t}[1], indexing='ij')|atleast_3d({t}, {t})|"
    "vstack([{t}, {t}])|dstack([{t}, {t}])|chain_matmul({t}, {t}.t())>\nkeep('lists', look(*found))",
    "keep('linalg', look(*torch.linalg.<qr({t}.float())|slogdet({t}.float()[:, :4])|lu({t}.float()[:, :4])|"
    "eigh({t}.float() @ {t}.float().mT)|cholesky_ex({t}.float()[:, :4])>))",
    "keep('linalg', look(torch.<linalg.matrix_power({t}[:, :4], 2)|linalg.det({t}.float()[:, :4])|trace({t})|"
    "linalg.pinv({t}.float())|linalg.vector_norm({t}, <0|1|3>)|matrix_exp({t}.float()[:, :4])|"
    "linalg.cross({t}[:, :3], {t}[:, 3:])>))",
    "packed = torch.nn.utils.parameters_to_vector([{t}, {t}])\n{T} = packed[:24].view(4, 6)",
    "s = {t}.detach().to_sparse()\n"
    "keep('sparse', look((s * 2).to_dense(), torch.sparse.mm(s.float(), {t}.float().mT),"
    " s.coalesce().values(), s._nnz()))",
    "s = {t}.detach().to_sparse()\n"
    "{T} = <{t} + s|s.to_dense() * {t}|torch.sparse.sum(s, 0).to_dense() + {t}|s.transpose(0, 1).to_dense().t()>",
    "n = torch.nested.nested_tensor([{t}.detach().float()[:2], {t}.detach().float()], layout=torch.jagged)\n"
    "keep('jagged', look((n * 2).values(), n.offsets()))",
    "x = {t}\nfile = io.BytesIO()\ntorch.save([x, x], file)\nfile.seek(0)\na, b = torch.load(file)\n"
    "keep('file', [a is b, a.untyped_storage().nbytes() < 4000])\n{T} = a",
    "{T} = copy.<deepcopy({t}.detach())|copy({t}.detach())|deepcopy([{t}.detach(), {t}.detach()])[1]>",
    "a = copy.deepcopy([{t}.detach(), {t}.detach()[1:]])\na[0].mul_(2)\nkeep('copies', look(*a))",
    "for _ in range(<50|300>):\n    {T} = ({T} * 0.5 + {t}) * 0.5",
    "for _ in range(<50|200>):\n    (at({t}, {p}) + {t}).sum()",
    "big = at(torch.ones(1000, <300|2000>), {p})\nbig.mul_(2)\n{T} = {t} + big.sum().item()\nbig = None",
    "big = torch.ones(500, 500)\nfound = [at(big, {p}) * n for n in range(<3|8>)]\n{T} = {t} + sum(found)[:4, :6]",
    "with torch.device('cpu'):\n    {T} = torch.zeros(4, 6) + {t}",
    "with <made_on('worker1')|made_on('worker2')>:\n"
    "    {T} = torch.<zeros(4, 6)|full((4, 6), 2)|eye(4, 6)|randn(4, 6)|arange(24).view(4, 6)|empty(4, 6).fill_(3)|"
    "tensor([[1.5]])|rand(4, 6)|randint(5, (4, 6))|as_tensor([1.0])> + {t}",
    "with default_dtype(torch.<float64|bfloat16>):\n"
    "    {T} = <torch.zeros(4, 6) + {t}|{t} * 2|{t} / 2|torch.randn(4, 6) + {t}|{t}.mean(0) + torch.tensor(0.5)|"
    "at(torch.ones(4, 6), {p})>",
    "with torch.autocast('cpu', torch.<bfloat16|float16>):\n"
    "    {T} = <({t} @ {t}.mT) @ {t}|F.linear({t}, {t}) @ {t}|F.softmax({t}, 1)|torch.cat([{t}[:2], {t}[2:]])|"
    "F.layer_norm({t}, (6,))|{t}.cumsum(1)>",
    "torch.<set_flush_denormal(False)|set_float32_matmul_precision('highest')>",
    "held = [{t} * n for n in range(20)]\ndel held[::2]\n{T} = held[-1]\nheld = None",
    "w = weakref.ref({t}[0] * 2)\nkeep('dead', w() is None)",
    "x = {t}.detach().float().cpu().numpy().copy()\ny = torch.from_numpy(x)\nz = {t} + y\nx[:] = 0\n{T} = z + y",
    "x = torch.zeros(4, 6)\nx += {t}.real.float()\nx[:, 0] = {t}[:, 1].real\nx.copy_({t}.real)\n{T} = x",
    "@torch.compile(backend='eager')\ndef compiled(x, y):\n    return (x.sin() + y * 2).clamp(-1, 1)\n{T} = compiled({t}, {t})",
    "p = torch.nn.Parameter({t}.detach().float().clone())\n"
    "o = torch.optim.<SGD([p], 0.1, momentum=0.9)|Adam([p], 0.1, amsgrad=True)|AdamW([p], 0.1, foreach=True)|"
    "Adam([p], 0.1, fused=True)|RMSprop([p], 0.1, maximize=True)|"
    "Adam([p], 0.1, capturable=False, differentiable=False)|NAdam([p], 0.1)|Rprop([p])|ASGD([p])|Muon([p])|"
    "Adafactor([p])>\nfor _ in range(3):\n    (p * {t}.detach().float()).sum().backward()\n    o.step()\n"
    "    o.zero_grad(<True|False>)\nkeep('optimizer', look(p, p.grad))\nkeep('state', o.state_dict()['state'])",
    "a = torch.nn.Linear(6, 6)\na.weight.data = at(a.weight.data, {p})\nkeep('linear', look(a({t}.float())))",
    "a = torch.nn.<BatchNorm1d(6)|LSTM(6, 6, batch_first=True)|MultiheadAttention(6, 2)|Bilinear(6, 6, 6)|"
    "GroupNorm(2, 4)|Linear(6, 6)>.to(device(<'worker1'|'worker2'>))\nx = {t}.float()\n"
    "x = a(x, x, x) if isinstance(a, torch.nn.MultiheadAttention) else a(x, x) if isinstance(a,"
    " torch.nn.Bilinear) else a(x[None]) if isinstance(a, torch.nn.GroupNorm) else a(x)\n"
    "keep('module', look(*x) if isinstance(x, tuple) else look(x))",
]

MODES = ["torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()", "torch.autocast('cpu', torch.bfloat16)"]

TABLES = [
    PLAIN,
    PLAIN,
    PLAIN,
    PLAIN,
    ALIASES,
    ALIASES,
    ALIASES,
    OUT,
    INDEXED,
    INDEXED,
    INDEXED,
    ASKED,
    CHANCE,
    GRADIENTS,
    GRADIENTS,
    LISTS,
]


@dataclass(frozen=True)
class Recipe:
    seed: int
    setup: tuple[str, ...]
    body: tuple[str, ...]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    floats = dice.random() < 0.4  # else most operations are errors of dtypes
    setup = []
    for name in NAMES:
        text, view = dice.choice(MADE)
        if not floats and dice.random() < 0.5 and "complex" not in text:
            text += f".to(torch.{dice.choice(DTYPES.split('|'))})"
        leaf = dice.choice(["", "", "", ".requires_grad_()" if ".to(" not in text else ""])
        text = f"at({text}, {dice.choice(PLACES)!r})"
        setup.append(f"{name} = {text}{drawn(view, dice)}{leaf}")
    index, mask = "torch.randint(0, 4, (4, 6), generator=draw)", "torch.rand(4, 6, generator=draw) > 0.5"
    for n in range(2):
        setup += [f"i{n} = at({index}, {dice.choice(PLACES)!r})", f"m{n} = at({mask}, {dice.choice(PLACES)!r})"]
    body = []
    for _ in range(dice.choice([4, 8, 12, 20])):
        text = statement(dice, dice.choice(dice.choice(TABLES)))
        if dice.random() < 0.12:
            text = f"with {dice.choice(MODES)}:\n" + "\n".join(_in(text.split("\n")))
        body.append(text)
    return Recipe(seed, tuple(setup), tuple(body))


def statement(dice: random.Random, text: str) -> str:
    once = {"T": dice.choice(NAMES), "U": dice.choice(NAMES)}

    def hole(found: re.Match[str]) -> str:
        name = found[1]
        if name in once:
            return once[name]
        choices = {"t": NAMES, "i": ["i0", "i1"], "m": ["m0", "m1"], "p": [repr(place) for place in PLACES]}
        return dice.choice(choices[name]) if name in choices else found[0]

    text = text.replace("VIEW", VIEW).replace("WRITE", WRITE).replace("DTYPES", DTYPES)
    while "|" in text:  # alternatives of alternatives
        text = drawn(text, dice)
    text = text.replace(".[", "[")
    return re.sub(r"\{(\w)\}", hole, text)


def source(made: Recipe) -> str:
    """The program's text."""
    names = ", ".join(NAMES)
    lines = [
        "import copy, io, weakref",
        "import torch",
        "import torch.nn.functional as F",
        "import torch.utils.checkpoint",
        "from mixed_calls import *",
        "from tensor_calls import *",
        "",
        "def program(place, keep):",
        f"    torch.manual_seed({made.seed})",
        f"    draw = torch.Generator().manual_seed({made.seed})",
        "    attempt, kept = attempts(keep), []",
        *_in(list(made.setup)),
    ]
    for number, text in enumerate(made.body):
        lines += _in([f"with attempt({number}):", *_in(text.split("\n"))])
        lines += _in([f"keep('seen {number}', look({names}))"])
    lines += _in([f"keep('end', look({names}, i0, i1, m0, m1, *kept))", ""])
    return "\n".join(lines)


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def smaller(made: Recipe) -> Iterator[Recipe]:
    """The same with one thing less."""
    half = len(made.body) // 2
    if half > 1:
        yield replace(made, body=made.body[:half])
        yield replace(made, body=made.body[half:])
    for n in range(len(made.body)):
        yield replace(made, body=made.body[:n] + made.body[n + 1 :])
